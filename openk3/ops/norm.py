"""Root-mean-square norms (model.md sections 4 and 5.1; report eq. 6).

Shapes: D hidden, T tokens, H heads, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.dispatch import pick


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [..., D], weight [D], in x.dtype.

    Normalised in promote(dtype, float32), cast to x.dtype, then multiplied by the weight in x.dtype: the rounding of
    the released model's ordinary norms (model.md section 4). Raises ValueError if the widths differ.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, but the last axis of x is {x.shape[-1]} wide")
    return pick("rms_norm", backend, {"reference": _rms_norm_reference, "fused": _rms_norm_fused}, "fused")(
        x, weight, eps
    )


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def _rms_norm_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _RMSNorm.apply(x, weight, eps)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which stays with length 1."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_input_grad(x: Tensor, r: Tensor, d_normed: Tensor) -> Tensor:
    """Gradient of x from that of x r, r = _inverse_rms(x); overwrites d_normed."""
    pull = torch.linalg.vecdot(d_normed, x).unsqueeze(-1).mul_(r).mul_(r).div_(-x.shape[-1])
    return d_normed.addcmul_(x, pull).mul_(r)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one scalar a row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, r)
        return (wide * r).to(x.dtype).mul_(weight.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        x, weight, r = ctx.saved_tensors
        wide, d = x.to(r.dtype), d_out.to(r.dtype)
        d_weight = r.flatten() @ (d * wide).reshape(-1, x.shape[-1])
        d_x = _norm_input_grad(wide, r, d * weight.to(x.dtype).to(r.dtype))
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


def gated_head_norm(o_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """RMSNorm(o; weight) * sigma(gate) per head, one weight [V] for all heads (report eq. 6).

    o and the raw gate are [T, H, V]; all in promote(dtype, float32), cast to o.dtype once. Norm before gate, and a
    sigmoid, not a SiLU. Raises ValueError if the shapes differ.
    """
    if o_THV.shape != gate_THV.shape or weight_V.shape != o_THV.shape[-1:]:
        raise ValueError(
            f"o {tuple(o_THV.shape)} and gate {tuple(gate_THV.shape)} must have one shape that ends in the width of "
            f"weight {tuple(weight_V.shape)}"
        )
    available = {"reference": _gated_head_norm_reference, "fused": _GatedHeadNorm.apply}
    return pick("gated_head_norm", backend, available, "fused")(o_THV, weight_V, gate_THV, eps)


def _gated_head_norm_reference(o_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(o_THV.dtype, torch.float32)
    normed_THV = _rms_norm_reference(o_THV.to(wide), weight_V, eps)
    return (normed_THV * torch.sigmoid(gate_THV.to(wide))).to(o_THV.dtype)


class _GatedHeadNorm(torch.autograd.Function):
    """Keeps o, the gate's sigmoid and one scalar a head and token."""

    @staticmethod
    def forward(ctx, o_THV, weight_V, gate_THV, eps):
        wide = torch.promote_types(o_THV.dtype, torch.float32)
        o, sigma = o_THV.to(wide), torch.sigmoid(gate_THV.to(wide))
        r = _inverse_rms(o, eps)
        ctx.save_for_backward(o_THV, weight_V, sigma, r)
        ctx.gate_dtype = gate_THV.dtype
        return (o * r).mul_(weight_V.to(wide)).mul_(sigma).to(o_THV.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        o_THV, weight_V, sigma, r = ctx.saved_tensors
        o, w_V = o_THV.to(r.dtype), weight_V.to(r.dtype)
        d_weighted = d_out.to(r.dtype) * sigma  # gradient of the normed and weighted o
        by_channel = d_weighted * o
        d_weight = r.flatten() @ by_channel.reshape(-1, o.shape[-1])
        d_gate = by_channel.mul_(r).mul_(w_V).mul_(1 - sigma)
        d_o = _norm_input_grad(o, r, d_weighted.mul_(w_V))
        return d_o.to(o_THV.dtype), d_weight.to(weight_V.dtype), d_gate.to(ctx.gate_dtype), None
