"""KDA in chunks: the recurrence as matrix products, forward and backward (report eq. 3 and 4; kernels.md 4.1, 6.2).

One chunk of C tokens, S0 the state entering it, G the running sum of the log decay inside it, Gam = exp(G):

    rows    X+ = [beta k; q] * Gam           columns  K- = k / Gam, or Ke = k * Gam_C / Gam
    scores  [L; A] = X+ K-^T                 L strictly lower, A lower triangle with its diagonal
    P  = (I + L)^-1                          the UT transform: all erasures inside the chunk at once
    Vt = P (beta v - X+_k S0)                what each token really writes
    O  = X+_q S0 + A Vt                      across chunks + inside the chunk
    S1 = Gam_C * S0 + Ke^T Vt

With beta folded into the rows, its gradient needs no division: dbeta_r = k_r . dx_r + v_r . Y_r, right at beta = 0 too.

A chunk in which no channel decays by more than e^-60 ("mild") is one tile: K- exists, and S1 = Gam_C * (S0 + K-^T Vt).
In any other, K- would overflow: its scores are built from tiles (pairs.py) and its columns are Ke. Both are written
S1 = post * (pre * S0 + columns^T Vt), so that everything else is shared. The choice is each chunk's own: a sequence
gives the same numbers alone and in company.

Only the state runs through the chunks serially, for all sequences and heads at once; all else is one batch.

Legend: T tokens, N sequences, H heads, m chunks, B = m H, C tokens of a chunk, K key and V value channels,
s stacks of rows (2, or 1 when no output is wanted). Memory kept for the backward pass: about 8 K + 2 V + 2 C numbers
and K V / C of state a token and head.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.kda import pairs
from openk3.ops.kda.gate import BoundedGate
from openk3.ops.kda.layout import Layout, build_layout
from openk3.ops.kda.prologue import Prologue, gate_backward, lowest_decay, prologue, unit_backward
from openk3.ops.kda.triangle import inverse_unit_lower

PAIR_BUDGET = 1 << 22  # numbers in one array of pair-by-pair exponentials
MILD_RANGE = 60.0  # e^60 = 1e26 leaves 1e12 of float32's range to the gradients that meet it


class Decay(NamedTuple):
    """Gam_BCK = exp(G); the columns' scale; pre_BK1 (None: all ones) and post_BK1 (None: all ones) of the state;
    chunks that are not mild, split by what their diagonal tiles need: (chunk indices, pairwise)."""

    Gam: Tensor
    column_scale: Tensor
    pre: Tensor | None
    post: Tensor | None
    wild: tuple[tuple[Tensor, bool], ...]


class Config(NamedTuple):
    layout: Layout
    scale: float
    lower_bound: float


def kda_chunked(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, bounds: tuple[int, ...],
    offsets: tuple[int, ...], gate: BoundedGate | None, scale: float, initial_state: Tensor | None, chunk: int = 0,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(o [T,H,V] or None without q, final state [N,H,K,V], states at the offsets [n,H,K,V]); any T, any decay <= 0.

    `bounds` are the sequence bounds. `chunk` is 16, 32 or 64; 0 chooses. Gradients are first order only.
    """
    T, H, K = k.shape
    dtype = torch.promote_types(k.dtype, torch.float32)
    layout = build_layout(bounds, offsets, chunk or preferred_chunk(K, v.shape[-1]), H, k.device)
    if initial_state is None:
        initial_state = torch.zeros(len(bounds) - 1, H, K, v.shape[-1], dtype=dtype, device=k.device)
    initial_state = initial_state.to(dtype)
    if T == 0:
        return None if q is None else v.clone(), initial_state.clone(), initial_state[:0]
    A_log, dt_bias, lower_bound = gate if gate is not None else (None, None, 0.0)
    config = Config(layout, scale, lower_bound)
    return _Chunked.apply(q, k, v, g, beta, A_log, dt_bias, initial_state, config)


def preferred_chunk(K: int, V: int) -> int:
    """Work inside a chunk grows with C, work on the state shrinks with it (measured: benchmarks/kda_cpu.py)."""
    return 32 if max(K, V) <= 32 else 64


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, initial_state, config):
        layout = config.layout
        p = prologue(
            layout, initial_state.dtype, q, k, v, g, beta, A_log, dt_bias, config.lower_bound, config.scale
        )
        decay = _decay(p.g)
        O, *kept = _forward(layout, p, decay, initial_state)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.pairwise = config, [pairwise for _, pairwise in decay.wild]
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, beta)]
        ctx.save_for_backward(
            *p, *decay[:4], *kept, None if A_log is None else g, A_log, dt_bias, *(i for i, _ in decay.wild)
        )
        states = kept[-1]
        o = None if O is None else layout.scatter(O).to(v.dtype)
        return o, states.index_select(0, layout.final), states.index_select(0, layout.cuts)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_final, d_cuts):
        config, (layout, scale, lower_bound) = ctx.config, ctx.config
        saved = ctx.saved_tensors
        p, kept, (z, A_log, dt_bias), wild = Prologue(*saved[:7]), saved[11:15], saved[15:18], saved[18:]
        decay = Decay(*saved[7:11], wild=tuple(zip(wild, ctx.pairwise, strict=True)))
        dx, dk, dv, dg, dbeta, d_initial = _backward(layout, p, decay, *kept, do, d_final, d_cuts)
        dq = None if p.q is None else layout.scatter(unit_backward(dx[:, 1], p.q, p.q_inverse_norm, scale))
        dk = layout.scatter(unit_backward(dk, p.k, p.k_inverse_norm, 1.0))
        dv = layout.scatter(dv)
        if A_log is None:
            dg = layout.scatter(dg.masked_fill_(p.g <= lowest_decay(p.g.dtype), 0))
            dbeta, d_A_log, d_dt_bias = layout.scatter(dbeta)[..., 0], None, None
        else:
            dg, dbeta, d_A_log, d_dt_bias = gate_backward(
                layout, dg, p.g, dbeta, p.beta, z, A_log, dt_bias, lower_bound
            )
        cast = [None if x is None else x.to(t) for x, t in zip((dq, dk, dv, dg, dbeta), ctx.dtypes, strict=True)]
        return *cast, d_A_log, d_dt_bias, d_initial, None


@lru_cache(maxsize=16)
def _ones_below(size: int, offset: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=dtype, device=device).tril(offset)


def _decay(g_BCK: Tensor) -> Decay:
    """Decay from the start of the chunk to each row, from each column on, and which chunks are mild."""
    B, C, K = g_BCK.shape
    Gam = torch.matmul(_ones_below(C, 0, g_BCK.dtype, g_BCK.device), g_BCK)
    mild = Gam[:, -1].amin(-1) >= -MILD_RANGE
    Gam.exp_()
    end = Gam[:, -1, :, None]
    if mild.all():
        return Decay(Gam, Gam.reciprocal(), None, end, ())
    wild = (~mild).nonzero().flatten()
    g_wild = g_BCK.index_select(0, wild)
    to_end = torch.matmul(_ones_below(C, -1, g_BCK.dtype, g_BCK.device).T, g_wild).exp_()
    pairwise = pairs.needs_pairs(g_wild)
    few = max(1, PAIR_BUDGET // (C * pairs.TILE * K))
    groups = [(wild[~pairwise], False)] if not pairwise.all() else []
    groups += [(index, True) for index in wild[pairwise].split(few)] if pairwise.any() else []
    if len(wild) == B:
        return Decay(Gam, to_end, end, None, tuple(groups))
    column_scale = Gam.reciprocal().index_copy_(0, wild, to_end)
    mild = mild[:, None, None]
    return Decay(Gam, column_scale, end.masked_fill(mild, 1), end.masked_fill(~mild, 1), tuple(groups))


def _rows_and_columns(p: Prologue, decay: Decay) -> tuple[Tensor, Tensor]:
    """X+ [B, s, C, K] and the columns [B, C, K]."""
    B, C, K = p.k.shape
    X = p.k.new_empty(B, 1 if p.q is None else 2, C, K)
    torch.mul(p.k, decay.Gam, out=X[:, 0]).mul_(p.beta)
    if p.q is not None:
        torch.mul(p.q, decay.Gam, out=X[:, 1])
    return X, p.k * decay.column_scale


def _wild_inputs(p: Prologue, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undecayed rows [b, s, C, K], columns and log decay of some chunks."""
    k, g = p.k.index_select(0, index), p.g.index_select(0, index)
    erase = k * p.beta.index_select(0, index)
    rows = (erase,) if p.q is None else (erase, p.q.index_select(0, index))
    return torch.stack(rows, 1), k, g


def _mask(scores_BsCC: Tensor) -> Tensor:
    """L keeps what is below the diagonal, A the diagonal too; in place."""
    scores_BsCC[:, 0].tril_(-1)
    if scores_BsCC.shape[1] == 2:
        scores_BsCC[:, 1].tril_()
    return scores_BsCC


def _scores(p: Prologue, decay: Decay, X: Tensor, columns: Tensor) -> Tensor:
    """[L; A] as [B, s, C, C]."""
    B, s, C, K = X.shape
    if decay.post is None:
        scores = X.new_empty(B, s, C, C)
    else:
        scores = torch.bmm(X.view(B, s * C, K), columns.mT).view(B, s, C, C)
    for index, pairwise in decay.wild:
        scores.index_copy_(0, index, pairs.decayed_products(*_wild_inputs(p, index), pairwise))
    return _mask(scores)


def _forward(layout: Layout, p: Prologue, decay: Decay, initial_state: Tensor) -> tuple[Tensor | None, ...]:
    """(O [B,C,V] or None, P [B,C,C], A [B,C,C] or None, Vt [B,C,V], states [N + m, H, K, V])."""
    X, columns = _rows_and_columns(p, decay)
    (B, s, C, K), V, H = X.shape, p.v.shape[-1], layout.heads
    scores = _scores(p, decay, X, columns)
    P = inverse_unit_lower(scores[:, 0])
    X, columns_T, write = X.view(B, s * C, K), columns.mT, p.v * p.beta
    states = X.new_empty(len(initial_state) + layout.chunks, H, K, V)
    torch.index_select(initial_state, 0, layout.order, out=states[: len(initial_state)])
    flat, after = states.view(-1, K, V), states[len(initial_state) :].view(B, K, V)
    read_out, Vt = X.new_empty(B, s * C, V), X.new_empty(B, C, V)
    for first, n, read in layout.steps:
        at, S = slice(first * H, (first + n) * H), flat[read * H : (read + n) * H]
        torch.bmm(X[at], S, out=read_out[at])
        torch.bmm(P[at], write[at] - read_out[at, :C], out=Vt[at])
        S = S if decay.pre is None else S * decay.pre[at]
        torch.baddbmm(S, columns_T[at], Vt[at], out=after[at])
        if decay.post is not None:
            after[at].mul_(decay.post[at])
    if s == 1:
        return None, P, None, Vt, states
    A = scores[:, 1].contiguous()
    return torch.baddbmm(read_out[:, C:], A, Vt), P, A, Vt, states


def _backward(
    layout: Layout, p: Prologue, decay: Decay, P: Tensor, A: Tensor | None, Vt: Tensor, states: Tensor,
    do: Tensor | None, d_final: Tensor | None, d_cuts: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients dx [B,s,C,K] (of beta k and q), dk (of k as a column and inside beta k), dv, dg, dbeta, d_initial."""
    X, columns = _rows_and_columns(p, decay)
    G, after, d_after, d_initial = _backward_states(
        layout, X, columns, decay, P, A, Vt, states, do, d_final, d_cuts
    )
    (B, s, C, K), V = X.shape, Vt.shape[-1]
    entering = states[: layout.chunks] if layout.enter is None else states.index_select(0, layout.enter)
    D = d_after if decay.post is None else d_after * decay.post
    d_scores = _mask(torch.bmm(G.view(B, s * C, V), Vt.mT).view(B, s, C, C))
    dX = torch.bmm(G.view(B, s * C, V), entering.view(B, K, V).mT)
    d_columns = torch.bmm(Vt, D.mT)
    by_tiles = [
        pairs.decayed_products_backward(d_scores.index_select(0, index), *_wild_inputs(p, index), pairwise)
        for index, pairwise in decay.wild
    ]
    if decay.post is not None:
        for index, _ in decay.wild:
            d_scores.index_fill_(0, index, 0)
        d_scores = d_scores.view(B, s * C, C)
        dX.baddbmm_(d_scores, columns)
        d_columns.baddbmm_(d_scores.mT, X.view(B, s * C, K))
    # The gradient of G from the very factors that were multiplied: a pair adds at its row what it takes away at its
    # column, and what is left after the sum can be smaller by the whole decay (kernels.md 6.2).
    dX = dX.view(B, s, C, K)
    dG = X[:, 0] * dX[:, 0]
    if s == 2:
        dG.addcmul_(X[:, 1], dX[:, 1])
    dG.addcmul_(columns, d_columns, value=-1)
    dG[:, -1] += (after * d_after).sum(-1)
    dg = torch.matmul(_ones_below(C, 0, dG.dtype, dG.device).T, dG)
    dx = dX.mul_(decay.Gam[:, None])
    dk = d_columns.mul_(decay.column_scale)
    for (index, _), (dx_wild, dk_wild, dg_wild) in zip(decay.wild, by_tiles, strict=True):
        dx.index_add_(0, index, dx_wild), dk.index_add_(0, index, dk_wild), dg.index_add_(0, index, dg_wild)
    Y = G[:, 0].neg()
    dbeta = (dx[:, 0] * p.k).sum(-1, keepdim=True).add_((Y * p.v).sum(-1, keepdim=True))
    return dx, dk.addcmul_(dx[:, 0], p.beta), Y.mul_(p.beta), dg, dbeta, d_initial


def _backward_states(
    layout: Layout, X: Tensor, columns: Tensor, decay: Decay, P: Tensor, A: Tensor | None, Vt: Tensor,
    states: Tensor, do: Tensor | None, d_final: Tensor | None, d_cuts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The serial part, backwards: (G = [-Y; dO] [B,s,C,V], S1, its gradient [B,K,V], gradient of the initial state).

    Y is the gradient of beta v - X+_k S0.
    """
    (B, s, C, K), V, H = X.shape, Vt.shape[-1], layout.heads
    N = len(states) - layout.chunks
    running = X.new_zeros(N, H, K, V) if d_final is None else d_final.index_select(0, layout.order)
    at_cuts = None
    if d_cuts is not None and len(d_cuts):
        at_cuts = X.new_zeros(states.shape).index_add_(0, layout.cuts, d_cuts)[N:].view(B, K, V)
    G, from_outputs = X.new_zeros(B, s, C, V), X.new_zeros(B, C, V)
    if s == 2 and do is not None:
        G[:, 1] = layout.gather(do)
        torch.bmm(A.mT, G[:, 1], out=from_outputs)
    running, d_after, X = running.view(N * H, K, V), X.new_empty(B, K, V), X.view(B, s * C, K)
    for first, n, _ in reversed(layout.steps):
        at, dS = slice(first * H, (first + n) * H), running[: n * H]
        if at_cuts is not None:
            dS += at_cuts[at]
        d_after[at] = dS
        if decay.post is not None:
            dS *= decay.post[at]
        d_Vt = torch.baddbmm(from_outputs[at], columns[at], dS)
        G[at, 0] = torch.bmm(P[at].mT, d_Vt).neg_()
        if decay.pre is not None:
            dS *= decay.pre[at]
        dS.baddbmm_(X[at].mT, G[at].view(n * H, s * C, V))
    d_initial = torch.empty_like(running.view(N, H, K, V))
    d_initial[layout.order] = running.view(N, H, K, V)
    return G, states[N:].view(B, K, V), d_after, d_initial
