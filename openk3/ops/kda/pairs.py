"""Decayed products between the tokens of one chunk, for any decay:

    out[r, i] = sum_c x[r, c] k[i, c] exp(G[r, c] - G[i, c])        for i <= r (G the running sum of the log decay)

As a matrix product this needs exp(G_r - ref) and exp(ref - G_i) on their own, and the second overflows when the
decay between ref and i is large. So the triangle is cut into tiles, each with a reference of its own (kernels.md 4.2):
below the diagonal the last token before the rows, where both exponents are <= 0; on the diagonal, 16 tokens wide,
the middle token, where the lower-bounded decay (>= -5 a token) keeps both within +-40. A diagonal tile with a
stronger decay is done pair by pair.

Exponents are sums of the log decays between two tokens, never differences of long running sums: terms of one sign do
not cancel, so one token with decay -1e4 does not spoil its neighbours.

Legend: B chunks (of one head each), C tokens of a chunk, K key channels, x two (or one) stacks of rows.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

TILE = 16
TILE_RANGE = 80.0  # e^80 = 5.5e34 is the largest factor formed; float32 ends at 3.4e38


@lru_cache(maxsize=16)
def signed_sums(span: int, ref: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[span, span] matrix that maps log decays to G_r - G_ref."""
    r, s = torch.arange(span, device=device)[:, None], torch.arange(span, device=device)
    return ((s > ref) & (s <= r)).to(dtype) - ((s > r) & (s <= ref)).to(dtype)


@lru_cache(maxsize=16)
def pair_sums(span: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[span * span, span] matrix that maps log decays to G_r - G_i for i <= r (0 above the diagonal)."""
    at = torch.arange(span, device=device)
    r, i, s = at[:, None, None], at[None, :, None], at
    return ((s > i) & (s <= r)).to(dtype).view(span * span, span)


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """Some entries of the first axis; None means all, without a copy."""
    return x if index is None else x.index_select(0, index)


def decay_factor_(exponent: Tensor) -> Tensor:
    """exp(exponent) in place, of an exponent <= 0, held above the denormal numbers (they take ten times as long)."""
    return exponent.clamp_(min=-700.0 if exponent.dtype == torch.float64 else -TILE_RANGE).exp_()


def levels(chunk: int) -> Iterator[tuple[int, slice, slice, int]]:
    """(span, rows, columns, reference) of the tiles: halves against halves, then the 16-token diagonal."""
    span = chunk
    while span > TILE:
        yield span, slice(span // 2, span), slice(0, span // 2), span // 2 - 1
        span //= 2
    yield TILE, slice(0, TILE), slice(0, TILE), TILE // 2 - 1


def needs_pairs(g_BCK: Tensor) -> Tensor:
    """[B] bool: does some 16-token tile decay too strongly for a matrix product (or hold a NaN)?"""
    sums = g_BCK.view(len(g_BCK), -1, TILE, g_BCK.shape[-1]).sum(2)
    return ~(sums.flatten(1).amin(1) >= -TILE_RANGE)


def _tiles(out: Tensor, span: int, rows: slice, columns: slice) -> Tensor:
    """The diagonal tiles of [B, s, C, C] as a writable view [B, C/span, s, rows, columns]."""
    B, s, C, _ = out.shape
    cut = out.view(B, s, C // span, span, C // span, span).diagonal(dim1=2, dim2=4)
    return cut[:, :, rows, columns].permute(0, 4, 1, 2, 3)


def _factors(x: Tensor, k: Tensor, g: Tensor, span: int, rows: slice, columns: slice, ref: int) -> tuple[Tensor, ...]:
    """Row factors [B n, s rows, K] and column factors [B n, columns, K] of the tiles, and their scales."""
    B, s, C, K = x.shape
    n = C // span
    D = torch.matmul(signed_sums(span, ref, g.dtype, g.device), g.view(B * n, span, K))
    if rows == columns:
        row_scale = D.exp_()
        column_scale = row_scale.reciprocal()
    else:
        row_scale, column_scale = decay_factor_(D[:, rows].contiguous()), decay_factor_(D[:, columns].neg())
    x_rows = x.view(B, s, n, span, K)[:, :, :, rows].transpose(1, 2)
    factors = torch.mul(x_rows, row_scale.view(B, n, 1, -1, K), out=x.new_empty(x_rows.shape))
    k_columns = k.view(B * n, span, K)[:, columns] * column_scale
    return factors.view(B * n, -1, K), k_columns, row_scale, column_scale


def decayed_products(x: Tensor, k: Tensor, g: Tensor, pairwise: bool) -> Tensor:
    """x [B,s,C,K], k [B,C,K], g [B,C,K] to [B,s,C,C]; what lies above the diagonal is not meaningful."""
    B, s, C, _ = x.shape
    out = x.new_zeros(B, s, C, C)
    for span, rows, columns, ref in levels(C):
        if span == TILE and pairwise:
            x_rows, weighted, _ = _pair_factors(x, k, g)
            tiles = torch.matmul(weighted, x_rows).permute(0, 3, 1, 2)
        else:
            x_rows, k_columns, _, _ = _factors(x, k, g, span, rows, columns, ref)
            tiles = torch.bmm(x_rows, k_columns.mT)
        view = _tiles(out, span, rows, columns)
        view.copy_(tiles.reshape(view.shape))
    return out


def decayed_products_backward(
    d_out: Tensor, x: Tensor, k: Tensor, g: Tensor, pairwise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, k and g; `d_out` must be zero above the diagonal."""
    B, s, C, K = x.shape
    dx, dk, dg = torch.zeros_like(x), torch.zeros_like(k), torch.zeros_like(g)
    for span, rows, columns, ref in levels(C):
        d_tiles = _tiles(d_out, span, rows, columns)
        if span == TILE and pairwise:
            _pairs_backward(d_tiles, x, k, g, dx, dk, dg)
            continue
        x_rows, k_columns, row_scale, column_scale = _factors(x, k, g, span, rows, columns, ref)
        n = C // span
        d_tiles = d_tiles.reshape(B * n, s * row_scale.shape[1], -1)
        d_rows, d_columns = torch.bmm(d_tiles, k_columns), torch.bmm(d_tiles.mT, x_rows)
        # d(G_r - G_ref): what a row gains and what a column loses, from the very numbers that were multiplied.
        dD = torch.zeros_like(g).view(B * n, span, K)
        dD[:, rows] += (d_rows * x_rows).view(B * n, s, -1, K).sum(1)
        dD[:, columns] -= d_columns * k_columns
        dg.view(B * n, span, K).add_(torch.matmul(signed_sums(span, ref, g.dtype, g.device).T, dD))
        d_rows = d_rows.view(B, n, s, -1, K) * row_scale.view(B, n, 1, -1, K)
        dx.view(B, s, n, span, K)[:, :, :, rows] += d_rows.transpose(1, 2)
        dk.view(B * n, span, K)[:, columns] += d_columns * column_scale
    return dx, dk, dg


def _pair_factors(x: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x of each diagonal tile [B n, row, K, s]; k_i exp(G_r - G_i) and the exponential [B n, row, column, K]."""
    B, s, C, K = x.shape
    n = C // TILE
    sums = torch.matmul(pair_sums(TILE, g.dtype, g.device), g.view(B * n, TILE, K))
    decay = decay_factor_(sums).view(B * n, TILE, TILE, K)
    x_rows = x.view(B, s, n, TILE, K).permute(0, 2, 3, 4, 1).reshape(B * n, TILE, K, s)
    return x_rows, decay * k.view(B * n, 1, TILE, K), decay


def _pairs_backward(d_tiles: Tensor, x: Tensor, k: Tensor, g: Tensor, dx: Tensor, dk: Tensor, dg: Tensor) -> None:
    B, s, C, K = x.shape
    n = C // TILE
    x_rows, weighted, decay = _pair_factors(x, k, g)
    d_pairs = d_tiles.permute(0, 1, 3, 4, 2).reshape(B * n, TILE, TILE, s)
    d_rows = torch.matmul(weighted.mT, d_pairs).view(B, n, TILE, K, s)
    dx.view(B, s, n, TILE, K).add_(d_rows.permute(0, 4, 1, 2, 3))
    d_weighted = torch.matmul(d_pairs, x_rows.mT)
    dk.view(B * n, TILE, K).add_((d_weighted * decay).sum(1))
    d_sums = d_weighted.mul_(weighted).view(B * n, TILE * TILE, K)
    dg.view(B * n, TILE, K).add_(torch.matmul(pair_sums(TILE, g.dtype, g.device).T, d_sums))
