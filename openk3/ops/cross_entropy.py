"""Cross-entropy of a linear head without the logits of all tokens in memory.

Letters: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.dispatch import pick

LOGITS_AT_ONCE = 2**21  # of a chunk of tokens: 8 MB in float32, so that a CPU keeps them in its cache


def linear_cross_entropy(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, backend: str = "auto") -> Tensor:
    """Summed -log softmax(h W^T)[target], a scalar in promote(dtype, float32).

    The logits are products in h's dtype, widened before the softmax; weight is cast to h's dtype. Raises ValueError
    if the shapes do not fit together.
    """
    if h_TD.shape != (len(targets_T), weight_VD.shape[1]):
        raise ValueError(f"h {tuple(h_TD.shape)}, weight {tuple(weight_VD.shape)}, targets {tuple(targets_T.shape)}")
    available = {"reference": _reference, "chunked": _Chunked.apply}
    return pick("linear_cross_entropy", backend, available, "chunked")(h_TD, weight_VD.to(h_TD.dtype), targets_T)


def _reference(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    return F.cross_entropy(F.linear(h_TD, weight_VD).to(wide), targets_T, reduction="sum")


class _Chunked(torch.autograd.Function):
    """A few tokens at a time; their gradient is taken while their logits are at hand, and scaled in the backward."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=h_TD.device)
        differentiable = any(ctx.needs_input_grad)
        if differentiable:
            grad_h_TD, grad_weight_VD = torch.empty_like(h_TD), torch.zeros_like(weight_VD, dtype=wide)
        rows = max(1, LOGITS_AT_ONCE // len(weight_VD))
        for start in range(0, len(h_TD), rows):
            h_CD, target_C1 = h_TD[start : start + rows], targets_T[start : start + rows, None]
            p_CV = F.linear(h_CD, weight_VD).to(wide)
            p_CV -= p_CV.amax(1, keepdim=True)
            picked = p_CV.gather(1, target_C1).sum()
            sums_C1 = p_CV.exp_().sum(1, keepdim=True)
            total += sums_C1.log().sum() - picked
            if differentiable:
                p_CV /= sums_C1
                p_CV.scatter_add_(1, target_C1, p_CV.new_full((1, 1), -1.0).expand_as(target_C1))
                p_CV = p_CV.to(h_TD.dtype)
                grad_h_TD[start : start + rows] = p_CV @ weight_VD
                grad_weight_VD += p_CV.T @ h_CD
        if differentiable:
            ctx.save_for_backward(grad_h_TD, grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_h_TD, grad_weight_VD = ctx.saved_tensors
        return grad_h_TD * grad.to(grad_h_TD.dtype), grad_weight_VD * grad.to(grad_weight_VD.dtype), None
