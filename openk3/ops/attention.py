"""Exact causal attention on the CPU, by blocks of queries.

A block of queries meets only the keys it may see, so half of the scores are never computed, and the scores of one
block stay in the cache. Nothing of size Lq x Lk is kept: the backward computes each block's probabilities again. Ragged
sequences need no padding. For sequences of 512 this takes about three quarters of the time of PyTorch's fused kernel,
which wants keys and values of one width; for short ones the fused kernel, many at a time, is faster
(benchmarks/ops_cpu.py).

Shapes: T tokens, H heads, Q query and key width, V value width, q and k the queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCORES = 1 << 18  # scores of a block, over all heads: 1 MiB in float32
ROWS = 128  # queries of a block at most: more would compute too many scores above the diagonal

Lengths = list[tuple[int, int]]  # queries and keys of each sequence


def attend_blocked(q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor, lengths: Lengths, scale: float) -> Tensor:
    """Causal softmax attention within each sequence, last query at the last key: o [T, H, V] in q's dtype.

    Scores, softmax and sums in promote(dtype, float32).
    """
    return _Attend.apply(q_THQ, k_THQ, v_THV, lengths, scale)


def _blocks(lengths: Lengths, heads: int) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys they see, by slices of the flat axes. The last keys are the block's own diagonal."""
    q_start = k_start = 0
    for lq, lk in lengths:
        rows = min(max(SCORES // max(heads * lk, 1), 1), ROWS)
        for a in range(0, lq, rows):
            b = min(a + rows, lq)
            yield slice(q_start + a, q_start + b), slice(k_start, k_start + lk - lq + b)
        q_start, k_start = q_start + lq, k_start + lk


class _Scratch:
    """Room for one block's scores, used again for the next; and the mask of a diagonal."""

    def __init__(self, like: Tensor, lengths: Lengths):
        self.heads = like.shape[0]
        blocks = list(_blocks(lengths, self.heads))
        rows = max((q.stop - q.start for q, _ in blocks), default=0)
        scores = max(((q.stop - q.start) * (k.stop - k.start) for q, k in blocks), default=0)
        self.flat = like.new_empty(self.heads * scores)
        self.mask = like.new_full((rows, rows), float("-inf")).triu_(1)
        self.blocks = blocks

    def probabilities(self, q_HqQ: Tensor, k_HkQ: Tensor, scale: float) -> Tensor:
        """softmax(q k^T scale) under the causal mask, [H, q, k]."""
        rows = q_HqQ.shape[1]
        s = self.scores(rows, k_HkQ.shape[1])
        torch.baddbmm(s, q_HqQ, k_HkQ.transpose(1, 2), beta=0, alpha=scale, out=s)
        if rows > 1:
            s[..., -rows:].add_(self.mask[:rows, :rows])
        return torch.softmax(s, dim=-1, out=s)

    def scores(self, rows: int, keys: int) -> Tensor:
        return self.flat[: self.heads * rows * keys].view(self.heads, rows, keys)


def _by_head(x_THW: Tensor, dtype: torch.dtype) -> Tensor:
    return x_THW.transpose(0, 1).to(dtype).contiguous()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THQ, k_THQ, v_THV, lengths, scale):
        wide = torch.promote_types(q_THQ.dtype, torch.float32)
        q, k, v = (_by_head(t, wide) for t in (q_THQ, k_THQ, v_THV))
        o_THV = q.new_empty(q_THQ.shape[0], *v_THV.shape[1:])
        o_HTV = o_THV.transpose(0, 1)
        scratch = _Scratch(q, lengths)
        for queries, keys in scratch.blocks:
            p = scratch.probabilities(q[:, queries], k[:, keys], scale)
            o_HTV[:, queries] = torch.bmm(p, v[:, keys])
        ctx.save_for_backward(q_THQ, k_THQ, v_THV, o_THV)
        ctx.lengths, ctx.scale = lengths, scale
        return o_THV.to(q_THQ.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do_THV):
        *inputs, o_THV = ctx.saved_tensors
        wide, scale = o_THV.dtype, ctx.scale
        q, k, v, do = (_by_head(t, wide) for t in (*inputs, do_THV))
        own_HT1 = torch.linalg.vecdot(do_THV.to(wide), o_THV).t().unsqueeze(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scratch, more = _Scratch(q, ctx.lengths), _Scratch(q, ctx.lengths)
        for queries, keys in scratch.blocks:
            do_q = do[:, queries]
            p = scratch.probabilities(q[:, queries], k[:, keys], scale)
            dv[:, keys].baddbmm_(p.transpose(1, 2), do_q)
            dp = torch.bmm(do_q, v[:, keys].transpose(1, 2), out=more.scores(*p.shape[1:]))
            ds = dp.sub_(own_HT1[:, queries]).mul_(p)
            dq[:, queries] = torch.bmm(ds, k[:, keys])
            dk[:, keys].baddbmm_(ds.transpose(1, 2), q[:, queries])
        grads = dq.mul_(scale), dk.mul_(scale), dv
        return *(g.transpose(0, 1).to(x.dtype) for g, x in zip(grads, inputs, strict=True)), None, None
