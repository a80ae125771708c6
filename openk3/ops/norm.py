"""Root-mean-square norms (model.md sections 4 and 5.1; report eq. 6).

Shapes: D hidden, T tokens, H heads, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    wide = torch.promote_types(x.dtype, torch.float32)
    if wide == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight.to(wide), eps)
    return F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype) * weight.to(x.dtype)


def gated_head_norm(
    o_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, eps: float, *, backend: str = "auto"
) -> Tensor:
    """RMSNorm(o; weight) * sigma(gate) per head, one weight [V] for all heads (report eq. 6).

    o and the raw gate are [T, H, V]; all in promote(dtype, float32), cast to o.dtype once. Norm before gate, and a
    sigmoid, not a SiLU. Raises ValueError if the shapes differ.
    """
    if o_THV.shape != gate_THV.shape or weight_V.shape != o_THV.shape[-1:]:
        raise ValueError(
            f"o {tuple(o_THV.shape)} and gate {tuple(gate_THV.shape)} must have one shape that ends in the width of "
            f"weight {tuple(weight_V.shape)}"
        )
    available = {"reference": _gated_head_norm_reference}
    return pick("gated_head_norm", backend, available, "reference")(o_THV, weight_V, gate_THV, eps)


def _gated_head_norm_reference(o_THV: Tensor, weight_V: Tensor, gate_THV: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(o_THV.dtype, torch.float32)
    normed_THV = _rms_norm_reference(o_THV.to(wide), weight_V, eps)
    return (normed_THV * torch.sigmoid(gate_THV.to(wide))).to(o_THV.dtype)
