"""Muon: momentum, made orthogonal by five Newton-Schulz steps (training.md section 2.1).

    M <- mu M + G        N = G + mu M        Y = NewtonSchulz(N / |N|)
    X <- (1 - lr wd) X - lr 0.2 sqrt(max(rows, cols)) Y

for every block X of a matrix on its own: a head of the q, k, v projections (Per-Head Muon, report section 2.5), an
expert, or a whole matrix. Blocks of one shape run as one batch. The scale makes the update as large as AdamW's, so
both share one learning rate.

Letters: B blocks, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openk3.train.parameters import Part

aten = torch.ops.aten  # many tensors in one call
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7  # a block with no gradient at all stays where it is instead of becoming 0 / 0
UPDATE_RMS = 0.2
BUCKET_ELEMENTS = 1 << 26  # bounds the copies that one batch of blocks needs: 256 MB each in float32


def newton_schulz(
    x_BRC: Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Blocks [B, R, C] with their singular values moved near 1, in `dtype` (default: bf16 on a GPU, else as given).

    The quintic does not converge to 1 but scatters around it, roughly 0.7 to 1.2; that is how it gets there in five
    steps. Singular values below about 1e-3 of the largest are left behind, hence one block a head.
    """
    a, b, c = coefficients
    tall = x_BRC.shape[1] > x_BRC.shape[2]
    y = x_BRC.mT if tall else x_BRC
    norm_B11 = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    if dtype is None:
        dtype = torch.bfloat16 if x_BRC.is_cuda else x_BRC.dtype
    y = (y / norm_B11).to(dtype)
    for _ in range(steps):
        gram = torch.bmm(y, y.mT)
        mix = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, mix, y, beta=a)
    return y.mT if tall else y


def update_scale(rows: int, columns: int) -> float:
    """An orthogonal block has RMS 1 / sqrt(max(rows, columns)); this brings it to 0.2."""
    return UPDATE_RMS * math.sqrt(max(rows, columns))


class Bucket:
    """Parts of one block shape, with their momentum in one tensor [B, R, C]."""

    def __init__(self, parts: Sequence[Part], parameters: Mapping[str, Tensor], weight_decay: float):
        self.parts, self.weight_decay = parts, weight_decay
        self.blocks = [part.of(parameters[part.name].detach()) for part in parts]
        self.weights = [parameters[part.name] for part in parts]
        self.momentum = torch.cat([torch.zeros_like(block) for block in self.blocks])
        self.sizes = [part.blocks for part in parts]
        self.scale = update_scale(parts[0].rows, parts[0].columns)

    def step(self, lr: float) -> list[Tensor]:
        """One update in place. Returns what was subtracted over lr, [blocks, R, C] a part."""
        grad_BRC = torch.cat([part.of(gradient(w)) for part, w in zip(self.parts, self.weights, strict=True)])
        self.momentum.mul_(MOMENTUM).add_(grad_BRC)
        nesterov_BRC = grad_BRC.add_(self.momentum, alpha=MOMENTUM)
        update_BRC = newton_schulz(nesterov_BRC).to(self.momentum.dtype).mul_(self.scale)
        updates = list(update_BRC.split(self.sizes))
        aten._foreach_mul_(self.blocks, 1 - lr * self.weight_decay)
        aten._foreach_add_(self.blocks, updates, alpha=-lr)
        return updates

    def state(self) -> dict[str, Tensor]:
        """Momentum by parameter, views [blocks, R, C] of the running one."""
        return {part.name: m for part, m in zip(self.parts, self.momentum.split(self.sizes), strict=True)}


def gradient(weight: Tensor) -> Tensor:
    """The gradient, contiguous; zeros where a batch did not reach the weight."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.contiguous()


def buckets(parts: Sequence[Part], parameters: Mapping[str, Tensor], weight_decay: float) -> list[Bucket]:
    """Parts sorted by shape, at most BUCKET_ELEMENTS together (one part at least)."""
    by_shape: dict[tuple, list[list[Part]]] = {}
    for part in parts:
        runs = by_shape.setdefault((part.rows, part.columns), [[]])
        elements = sum(p.blocks for p in runs[-1]) * part.rows * part.columns
        if runs[-1] and elements + part.blocks * part.rows * part.columns > BUCKET_ELEMENTS:
            runs.append([])
        runs[-1].append(part)
    return [Bucket(run, parameters, weight_decay) for runs in by_shape.values() for run in runs]
