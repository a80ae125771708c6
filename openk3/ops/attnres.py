"""Attention Residuals: softmax over depth (report eq. 8 to 10; model.md section 7; kernels.md section 13).

    s_i = rsqrt(mean(v_i^2) + eps) * (w . v_i)     w = gamma * query, folded once
    a   = softmax over i of s                      out = sum_i a_i v_i

Keys are normalised, values are raw; no 1/sqrt(D), no bias. Everything in promote(dtype, float32), cast once.
Shapes: S sources, T tokens, D hidden, Q queries of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.ops.dispatch import pick


def attnres(
    sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor, eps: float = 1e-5, *, backend: str = "auto"
) -> Tensor:
    """Mix S sources, each [T, D], by a query that sees no input: [T, D] in the sources' dtype.

    Raises ValueError if there is no source or a shape differs.
    """
    _check(sources, query_D, gamma_D)
    available = {"reference": _attnres_reference, "fused": _attnres_fused}
    return pick("attnres", backend, available, "fused")(sources, query_D, gamma_D, eps)


def attnres_weights(sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor, eps: float = 1e-5) -> Tensor:
    """The weights a [S, T] that `attnres` would use, in promote(dtype, float32)."""
    _check(sources, query_D, gamma_D)
    w_D = fold(query_D, gamma_D)
    return torch.softmax(torch.stack([_scores(v, w_D, eps)[0] for v in sources]), dim=0)


def fold(query_D: Tensor, gamma_D: Tensor) -> Tensor:
    """gamma * query in promote(dtype, float32): only the product matters."""
    return query_D.to(torch.promote_types(query_D.dtype, torch.float32)) * gamma_D


def _check(sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor) -> None:
    if not sources:
        raise ValueError("attnres needs at least one source, got none")
    shapes = [tuple(v.shape) for v in sources]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ValueError(f"sources must have one shape [T, D], got {shapes}")
    if query_D.shape != shapes[0][1:] or gamma_D.shape != shapes[0][1:]:
        raise ValueError(
            f"query {tuple(query_D.shape)} and gamma {tuple(gamma_D.shape)} must be as wide as the sources, "
            f"{shapes[0][1]}"
        )


def _scores(v_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Scores [T] of one source and the inverse root mean squares [T] they contain."""
    v = v_TD.to(torch.promote_types(v_TD.dtype, w_D.dtype))
    r_T = torch.rsqrt(torch.linalg.vector_norm(v, dim=-1).square() / v.shape[-1] + eps)
    return r_T * (v @ w_D.to(v.dtype)), r_T


def _mix(a_ST: Tensor, sources: Sequence[Tensor]) -> Tensor:
    out_TD = a_ST[0][:, None] * sources[0]
    for a_T, v_TD in zip(a_ST[1:], sources[1:], strict=True):
        out_TD.addcmul_(a_T[:, None], v_TD.to(out_TD.dtype))
    return out_TD


def _attnres_reference(sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
    w_D = fold(query_D, gamma_D)
    v_STD = torch.stack([v.to(torch.promote_types(v.dtype, w_D.dtype)) for v in sources])
    key_STD = v_STD * torch.rsqrt(v_STD.square().mean(-1, keepdim=True) + eps)
    a_ST = torch.softmax(key_STD @ w_D.to(v_STD.dtype), dim=0)
    return (a_ST[..., None] * v_STD).sum(0).to(sources[0].dtype)


def _attnres_fused(sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
    return _AttnRes.apply(fold(query_D, gamma_D), eps, *sources)


class _AttnRes(torch.autograd.Function):
    """Keeps the sources (which live anyway) and three scalars per token and source; kernels.md section 13.1."""

    @staticmethod
    def forward(ctx, w_D, eps, *sources):
        scores, inverse_rms = zip(*(_scores(v, w_D, eps) for v in sources), strict=True)
        s_ST, r_ST = torch.stack(scores), torch.stack(inverse_rms)
        a_ST = torch.softmax(s_ST, dim=0)
        ctx.save_for_backward(w_D, s_ST, r_ST, a_ST, *sources)
        return _mix(a_ST, sources).to(sources[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        w_D, s_ST, r_ST, a_ST, *sources = ctx.saved_tensors
        d_TD = d_out.to(a_ST.dtype)
        da_ST = torch.stack([torch.linalg.vecdot(d_TD, v.to(d_TD.dtype)) for v in sources])
        ds_ST = a_ST * (da_ST - (a_ST * da_ST).sum(0))
        key_ST = ds_ST * r_ST
        value_ST = -key_ST * r_ST * s_ST / d_TD.shape[-1]
        d_w = torch.zeros_like(w_D)
        grads = []
        for a_T, key_T, value_T, v in zip(a_ST, key_ST, value_ST, sources, strict=True):
            v_TD = v.to(d_TD.dtype)
            d_w += key_T @ v_TD
            grad = a_T[:, None] * d_TD
            grad.addcmul_(key_T[:, None], w_D.to(grad.dtype)).addcmul_(value_T[:, None], v_TD)
            grads.append(grad.to(v.dtype))
        return d_w, None, *grads


def attnres_scan(blocks: Sequence[Tensor], queries_QD: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """Phase one of the exact two-phase form: read the finished blocks once for all queries of a block.

    Queries have gamma folded in. Returns the running softmax (m [Q, T], l [Q, T], O [Q, T, D]): maximum score, sum
    of e^(s - m), and the sum of e^(s - m) v, in promote(dtype, float32). Raises ValueError without a block.
    """
    if not blocks:
        raise ValueError("attnres_scan needs at least one finished block, got none")
    wide = torch.promote_types(torch.promote_types(blocks[0].dtype, queries_QD.dtype), torch.float32)
    v_BTD = torch.stack([v.to(wide) for v in blocks])
    r_BT = torch.rsqrt(v_BTD.square().mean(-1) + eps)
    s_QBT = torch.einsum("qd,btd->qbt", queries_QD.to(wide), v_BTD) * r_BT
    m_QT = s_QBT.amax(1)
    e_QBT = torch.exp(s_QBT - m_QT[:, None])
    return m_QT, e_QBT.sum(1), torch.einsum("qbt,btd->qtd", e_QBT, v_BTD)


def attnres_merge(
    m_T: Tensor, l_T: Tensor, o_TD: Tensor, partial_TD: Tensor | None, query_D: Tensor, eps: float = 1e-5
) -> Tensor:
    """Phase two: one query's running softmax, and the partial sum as its last source (None: a block's first site).

    `query_D` has gamma folded in. Returns the mix [T, D] in the partial sum's dtype (without one, in o's).
    """
    if partial_TD is None:
        return o_TD / l_T[:, None]
    s_T = _scores(partial_TD, query_D.to(o_TD.dtype), eps)[0]
    top_T = torch.maximum(m_T, s_T)
    old_T, new_T = torch.exp(m_T - top_T), torch.exp(s_T - top_T)
    mixed_TD = old_T[:, None] * o_TD + new_T[:, None] * partial_TD
    return (mixed_TD / (old_T * l_T + new_T)[:, None]).to(partial_TD.dtype)
