"""The three parameter holders every other module is made of: Linear, RMSNorm, Weight.

Master weights may be float32 while activations are bf16: a holder casts its weight to the input's dtype, so the
compute dtype is whatever the caller feeds in, never an autocast. There are no biases anywhere (model.md section 0).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.ops.norm import rms_norm


class Linear(nn.Module):
    """y = x W^T with `weight` [out, in], normal(0, std) at the start."""

    def __init__(self, n_in: int, n_out: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.std = std

    def reset(self, generator: torch.Generator) -> None:
        self.weight.data.normal_(0.0, self.std, generator=generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD, self.weight.to(x_TD.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis with `weight` [width], ones at the start."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def reset(self, generator: torch.Generator) -> None:
        self.weight.data.fill_(1.0)

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class Weight(nn.Module):
    """A bare parameter `weight` of any shape, filled with one value at the start (queries, norms folded elsewhere)."""

    def __init__(self, *shape: int, fill: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.fill = fill

    def reset(self, generator: torch.Generator) -> None:
        self.weight.data.fill_(self.fill)


class ConvWeight(nn.Module):
    """`weight` [channels, 1, width] of a depthwise convolution; the framework's default start, U(-w^-1/2, w^-1/2)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def reset(self, generator: torch.Generator) -> None:
        bound = self.weight.shape[-1] ** -0.5
        self.weight.data.uniform_(-bound, bound, generator=generator)
