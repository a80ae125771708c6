"""The short convolution before KDA: depthwise, causal, SiLU fused (model.md section 5.1, step 2).

    z_t = sum_j w_j x_{t - (W - 1) + j}      y_t = SiLU(z_t)      w_{W-1} multiplies the current token

Shapes: T tokens, C channels, W width (4), N sequences. What stands before a sequence is its carried tail, the last
W - 1 inputs [N, W - 1, C], or zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.dispatch import pick


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    *,
    cu_seqlens: Tensor,
    initial_tail: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """SiLU of the convolution [T, C] in x's dtype, and the inputs to carry on with [N, W - 1, C].

    Products and sums in promote(dtype, float32). A sequence of length zero hands its tail on unchanged. Raises
    ValueError if shapes do not fit each other.
    """
    n, width = len(cu_seqlens) - 1, weight_CW.shape[-1]
    if x_TC.dim() != 2 or weight_CW.shape != (x_TC.shape[1], width):
        raise ValueError(f"weight {tuple(weight_CW.shape)} must be [C, W] for x {tuple(x_TC.shape)} of [T, C]")
    if initial_tail is not None and initial_tail.shape != (n, width - 1, x_TC.shape[1]):
        raise ValueError(
            f"initial_tail has shape {tuple(initial_tail.shape)}, expected {(n, width - 1, x_TC.shape[1])}"
        )
    return pick("short_conv", backend, {"reference": _reference}, "reference")(
        x_TC, weight_CW, cu_seqlens, initial_tail
    )


def _reference(
    x_TC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor, initial_tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    n, width, channels = len(cu_seqlens) - 1, weight_CW.shape[1], x_TC.shape[1]
    tails = x_TC.new_zeros(n, width - 1, channels) if initial_tail is None else initial_tail.to(x_TC.dtype)
    outputs, final = [], []
    for x_LC, tail_WC in zip(x_TC.split(cu_seqlens.diff().tolist()), tails, strict=True):
        padded = torch.cat([tail_WC, x_LC])
        z_LC = sum(padded[j : j + len(x_LC)].to(wide) * weight_CW[:, j].to(wide) for j in range(width))
        outputs.append(F.silu(z_LC).to(x_TC.dtype))
        final.append(padded[len(padded) - (width - 1) :])
    if not final:
        return x_TC.clone(), tails
    return torch.cat(outputs), torch.stack(final)
