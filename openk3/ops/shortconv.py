"""The short convolution before KDA: depthwise, causal, SiLU fused (model.md section 5.1, step 2).

    z_t = sum_j w_j x_{t - (W - 1) + j}      y_t = SiLU(z_t)      w_{W-1} multiplies the current token

What stands before a sequence is its carried tail, the last W - 1 inputs, or zeros.
Shapes: T tokens, C channels, W width (4), N sequences, R rows within the first W - 1 of their sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.dispatch import pick

BLOCK = 1 << 18  # elements a pass works on before the next: on a CPU all operands of a block fit the cache
GPU_BLOCK = 1 << 22  # on a GPU launches cost more than passes; the bound is for the scratch of the weight gradient


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
    available = {"reference": _reference, "blocked": _blocked}
    return pick("short_conv", backend, available, "blocked")(x_TC, weight_CW, cu_seqlens, initial_tail)


def _reference(
    x_TC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor, initial_tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    n, width, channels = len(cu_seqlens) - 1, weight_CW.shape[1], x_TC.shape[1]
    tails = x_TC.new_zeros(n, width - 1, channels) if initial_tail is None else initial_tail.to(x_TC.dtype)
    outputs, final = [], []
    for x_LC, tail_WC in zip(x_TC.split(cu_seqlens.diff().tolist()), tails, strict=True):
        padded = torch.cat([tail_WC, x_LC])
        z_LC = torch.zeros_like(x_LC, dtype=wide)
        for j in range(width):
            z_LC = z_LC + padded[j : j + len(x_LC)].to(wide) * weight_CW[:, j].to(wide)
        outputs.append(F.silu(z_LC).to(x_TC.dtype))
        final.append(padded[len(padded) - (width - 1) :])
    if not final:
        return x_TC.clone(), tails
    return torch.cat(outputs), torch.stack(final)


def _blocked(x_TC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor, initial_tail: Tensor | None) -> tuple[Tensor, Tensor]:
    y_TC = _Convolve.apply(x_TC, weight_CW, cu_seqlens, initial_tail)
    return y_TC, _final_tail(x_TC, weight_CW.shape[1] - 1, cu_seqlens, initial_tail)


def _before_and_within(x_TC: Tensor, rows: Tensor, sequence: Tensor, first: Tensor, tails: Tensor | None) -> Tensor:
    """x at the token positions `rows`; where a row lies before its sequence's first token, from the tail, or zero."""
    outside = rows < first
    values = x_TC[rows.clamp(min=0)] if len(x_TC) else x_TC.new_zeros(*rows.shape, x_TC.shape[1])
    if tails is None:
        return values.masked_fill(outside[..., None], 0)
    slot = (tails.shape[1] + rows - first).clamp(0, tails.shape[1] - 1)
    return torch.where(outside[..., None], tails[sequence, slot].to(x_TC.dtype), values)


def _final_tail(x_TC: Tensor, reach: int, cu_seqlens: Tensor, initial_tail: Tensor | None) -> Tensor:
    """The last `reach` inputs of every sequence [N, reach, C], its tail included."""
    cu = cu_seqlens.long()
    rows = cu[1:, None] + torch.arange(-reach, 0, device=cu.device)
    sequence = torch.arange(len(cu) - 1, device=cu.device)[:, None]
    return _before_and_within(x_TC, rows, sequence, cu[:-1, None], initial_tail)


def _first_rows(cu_seqlens: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows within the first `reach` of their sequence: their positions [R], sequences [R], and first tokens [R]."""
    cu = cu_seqlens.long()
    rows = cu[:-1, None] + torch.arange(reach, device=cu.device)
    n, _ = (inside := rows < cu[1:, None]).nonzero(as_tuple=True)
    return rows[inside], n, cu[:-1][n]


def _blocks(x_TC: Tensor) -> list[tuple[int, int]]:
    n_tokens, channels = x_TC.shape
    size = max(1, (BLOCK if x_TC.device.type == "cpu" else GPU_BLOCK) // max(1, channels))
    return [(a, min(a + size, n_tokens)) for a in range(0, n_tokens, size)]


class _Convolve(torch.autograd.Function):
    """Shifted multiply-adds over the flat axis, block by block, as if it were one sequence; the few rows that reach
    over a boundary are computed apart from gathered windows [R, W, C]."""

    @staticmethod
    def forward(ctx, x_TC, weight_CW, cu_seqlens, initial_tail):
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        x, w_WC = x_TC.to(wide).contiguous(), weight_CW.to(wide).t().contiguous()
        rows, sequence, first = _first_rows(cu_seqlens, len(w_WC) - 1)
        window_RWC = _window(x, rows, sequence, first, initial_tail, len(w_WC))
        z_RC = (window_RWC * w_WC).sum(1)
        z_TC, y_TC = torch.empty_like(x), torch.empty_like(x)
        for a, b in _blocks(x):
            torch.mul(x[a:b], w_WC[-1], out=z_TC[a:b])
            for lag in range(1, len(w_WC)):
                z_TC[max(a, lag) : b].addcmul_(x[max(a, lag) - lag : b - lag], w_WC[-1 - lag])
            torch.ops.aten.silu.out(z_TC[a:b], out=y_TC[a:b])
        z_TC[rows], y_TC[rows] = z_RC, F.silu(z_RC)
        ctx.save_for_backward(x_TC, weight_CW, initial_tail, z_TC, rows, sequence, first)
        return y_TC.to(x_TC.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_TC):
        x_TC, weight_CW, tails, z_TC, rows, sequence, first = ctx.saved_tensors
        x, w_WC = x_TC.to(z_TC.dtype).contiguous(), weight_CW.to(z_TC.dtype).t().contiguous()
        reach = len(w_WC) - 1
        dy = dy_TC.to(z_TC.dtype)
        dz_RC = torch.ops.aten.silu_backward(dy[rows], z_TC[rows])
        dz_TC = torch.empty_like(z_TC)
        dx_TC = torch.empty_like(x)
        blocks = _blocks(x)
        dw_WBC = w_WC.new_zeros(len(w_WC), max((b - a for a, b in blocks), default=0), x.shape[1])
        for a, b in reversed(blocks):  # backwards: dx of a block needs the next rows' dz
            torch.ops.aten.silu_backward.grad_input(dy[a:b], z_TC[a:b], grad_input=dz_TC[a:b])
            dz_TC[rows[(rows >= a) & (rows < b)]] = 0
            torch.mul(dz_TC[a:b], w_WC[-1], out=dx_TC[a:b])
            for lag in range(1, reach + 1):
                stop = min(b, len(x) - lag)
                dx_TC[a:stop].addcmul_(dz_TC[a + lag : stop + lag], w_WC[-1 - lag])
            if (start := max(a, reach)) < b:  # the rows before are within reach of a start: their dz is 0 here
                windows = x[start - reach :].as_strided(
                    (reach + 1, b - start, x.shape[1]), (*x.stride()[:1], *x.stride())
                )
                dw_WBC[:, : b - start].addcmul_(dz_TC[start:b], windows)
        dw_WC = dw_WBC.sum(1)
        window_RWC = _window(x, rows, sequence, first, tails, len(w_WC))
        dw_WC += torch.einsum("rc,rwc->wc", dz_RC, window_RWC)
        d_window_RWC = dz_RC[:, None] * w_WC
        source = rows[:, None] + torch.arange(-reach, 1, device=rows.device)
        inside = source >= first[:, None]
        dx_TC.index_add_(0, source[inside], d_window_RWC[inside])
        d_tails = None
        if tails is not None:
            d_tails = torch.zeros_like(tails, dtype=dx_TC.dtype)
            slot = (reach + source - first[:, None])[~inside]
            n = sequence[:, None].expand_as(source)[~inside]
            d_tails.index_put_((n, slot), d_window_RWC[~inside], accumulate=True)
            d_tails = d_tails.to(tails.dtype)
        return dx_TC.to(x_TC.dtype), dw_WC.t().to(weight_CW.dtype), None, d_tails


def _window(x_TC: Tensor, rows: Tensor, sequence: Tensor, first: Tensor, tails: Tensor | None, width: int) -> Tensor:
    """The inputs each of the rows [R] sees: [R, W, C]."""
    sources = rows[:, None] + torch.arange(1 - width, 1, device=rows.device)
    return _before_and_within(x_TC, sources, sequence[:, None], first[:, None], tails)
