"""KDA in chunks: the recurrence as matrix products, forward and backward (report eq. 3 and 4; kernels.md 4.1, 6.2).

One chunk of C tokens, S0 the state entering it, G the running sum of the log decay inside it, Gam = exp(G):

    rows    X+ = [beta k; q] * Gam           columns  K- = k / Gam, or Ke = k * Gam_C / Gam
    scores  [L; A] = X+ K-^T                 L strictly lower, A lower triangle with its diagonal
    P  = (I + L)^-1                          the UT transform: all erasures inside the chunk at once
    Vt = P (beta v - X+_k S0)                what each token really writes
    O  = X+_q S0 + A Vt                      across chunks + inside the chunk (times the scale of q)
    S1 = Gam_C * S0 + Ke^T Vt

With beta folded into the rows, its gradient needs no division: dbeta_r = k_r . dx_r + v_r . Y_r, right at beta = 0 too.

A chunk in which no channel decays by more than e^-60 ("mild") is one tile: K- exists, and S1 = Gam_C * (S0 + K-^T Vt).
In any other, K- would overflow: its scores are built from tiles (pairs.py) and its columns are Ke. Both are written
S1 = post * (pre * S0 + columns^T Vt), so that everything else is shared. The choice is each chunk's own: a sequence
gives the same numbers alone and in company.

Only the state runs through the chunks serially, for all sequences and heads at once; all else is one batch.

Legend: T tokens, N sequences, H heads, m chunks, B = m H, C tokens of a chunk, K key and V value channels,
s stacks of rows (2, or 1 when no output is wanted). Kept for the backward pass, a token and head: 6 K + 2 V + 3 C
numbers, and K V / C of states; everything decayed is computed again.
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
    chunks that are not mild, split by what their diagonal tiles need: (chunk indices, None for all; pairwise)."""

    Gam: Tensor
    column_scale: Tensor
    pre: Tensor | None
    post: Tensor | None
    wild: tuple[tuple[Tensor | None, bool], ...]


class Config(NamedTuple):
    layout: Layout
    scale: float
    lower_bound: float


def kda_chunked(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    bounds: tuple[int, ...],
    offsets: tuple[int, ...],
    gate: BoundedGate | None,
    scale: float,
    initial_state: Tensor | None,
    chunk: int = 0,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(o [T,H,V] or None without q, final state [N,H,K,V], states at the offsets [n,H,K,V]); any T, any decay <= 0.

    `bounds` are the sequence bounds. `chunk` is 16, 32 or 64; 0 chooses. Gradients are first order only.
    """
    T, H, K = k.shape
    dtype = torch.promote_types(k.dtype, torch.float32)
    if initial_state is None:
        initial_state = torch.zeros(len(bounds) - 1, H, K, v.shape[-1], dtype=dtype, device=k.device)
    initial_state = initial_state.to(dtype)
    if T == 0:
        return None if q is None else v.clone(), initial_state.clone(), initial_state[:0]
    layout = build_layout(bounds, offsets, chunk or preferred_chunk(K, v.shape[-1]), H, k.device)
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
        p = prologue(layout, initial_state.dtype, q, k, v, g, beta, A_log, dt_bias, config.lower_bound)
        decay = _decay(p.g)
        o_BCV, P, scores, Vt, states = _forward(layout, p, decay, initial_state)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.pairwise = config, [pairwise for _, pairwise in decay.wild]
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, beta)]
        ctx.save_for_backward(
            *p,
            *decay[:4],
            P,
            scores,
            Vt,
            states,
            None if A_log is None else g,
            A_log,
            dt_bias,
            *(i for i, _ in decay.wild),
        )
        o = None if o_BCV is None else layout.scatter(o_BCV).mul_(config.scale).to(v.dtype)
        return o, states.index_select(0, layout.final), states.index_select(0, layout.cuts)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_final, d_cuts):
        layout, scale, lower_bound = ctx.config
        saved = ctx.saved_tensors
        p, kept, (z, A_log, dt_bias), wild = Prologue(*saved[:7]), saved[11:15], saved[15:18], saved[18:]
        decay = Decay(*saved[7:11], wild=tuple(zip(wild, ctx.pairwise, strict=True)))
        dO = None if do is None else layout.gather(do).to(p.k.dtype).mul_(scale)
        P, scores, Vt, states = kept
        dx, dk, dv, dg, dbeta, d_initial = _backward(layout, p, decay, P, scores, Vt, states, dO, d_final, d_cuts)
        dq = None
        if p.q is not None:
            assert p.q_inverse_norm is not None  # kept with q
            dq = layout.scatter(unit_backward(dx[:, 1], p.q, p.q_inverse_norm))
        dk = layout.scatter(unit_backward(dk, p.k, p.k_inverse_norm))
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
    _, C, K = g_BCK.shape
    Gam = torch.matmul(_ones_below(C, 0, g_BCK.dtype, g_BCK.device), g_BCK)
    mild = Gam[:, -1].amin(-1) >= -MILD_RANGE
    if mild.all():
        Gam.exp_()
        return Decay(Gam, Gam.reciprocal(), None, Gam[:, -1, :, None], ())
    wild = (~mild).nonzero().flatten() if mild.any() else None
    pairs.decay_factor_(Gam)
    end = Gam[:, -1, :, None]
    g_wild = pairs.take(g_BCK, wild)
    to_end = pairs.decay_factor_(torch.matmul(_ones_below(C, -1, g_BCK.dtype, g_BCK.device).T, g_wild))
    groups = _by_tile(wild, pairs.needs_pairs(g_wild), PAIR_BUDGET // (C * pairs.TILE * K))
    if wild is None:
        return Decay(Gam, to_end, end, None, groups)
    column_scale = Gam.reciprocal().index_copy_(0, wild, to_end)
    mild = mild[:, None, None]
    return Decay(Gam, column_scale, end.masked_fill(mild, 1), end.masked_fill(~mild, 1), groups)


def _by_tile(wild: Tensor | None, pairwise: Tensor, most: int) -> tuple[tuple[Tensor | None, bool], ...]:
    """Wild chunks (None: all) in groups that treat their diagonal tiles alike, at most `most` pair by pair at once."""
    if not pairwise.any():
        return ((wild, False),)
    if wild is None:
        wild = torch.arange(len(pairwise), device=pairwise.device)
    groups = [] if pairwise.all() else [(wild[~pairwise], False)]
    return *groups, *((index, True) for index in wild[pairwise].split(max(1, most)))


def _rows_and_columns(p: Prologue, decay: Decay) -> tuple[Tensor, Tensor]:
    """X+ [B, s, C, K] and the columns [B, C, K]."""
    B, C, K = p.k.shape
    X = p.k.new_empty(B, 1 if p.q is None else 2, C, K)
    torch.mul(p.k, decay.Gam, out=X[:, 0]).mul_(p.beta)
    if p.q is not None:
        torch.mul(p.q, decay.Gam, out=X[:, 1])
    return X, p.k * decay.column_scale


def _wild_inputs(p: Prologue, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Undecayed rows [b, s, C, K], columns and log decay of some chunks."""
    k, beta = pairs.take(p.k, index), pairs.take(p.beta, index)
    rows = k.new_empty(len(k), 1 if p.q is None else 2, *k.shape[1:])
    torch.mul(k, beta, out=rows[:, 0])
    if p.q is not None:
        rows[:, 1] = pairs.take(p.q, index)
    return rows, k, pairs.take(p.g, index)


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
        tiles = pairs.decayed_products(*_wild_inputs(p, index), pairwise)
        scores = tiles if index is None else scores.index_copy_(0, index, tiles)
    return _mask(scores)


def _forward(
    layout: Layout, p: Prologue, decay: Decay, initial_state: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """(output [B,C,V] or None, P [B,C,C], scores [B,s,C,C], Vt [B,C,V], states [N + m, H, K, V])."""
    X, columns = _rows_and_columns(p, decay)
    (B, s, C, K), V, H, N = X.shape, p.v.shape[-1], layout.heads, len(initial_state)
    scores = _scores(p, decay, X, columns)
    P = inverse_unit_lower(scores[:, 0])
    write = p.v * p.beta
    states = X.new_empty(N + layout.chunks, H, K, V)
    torch.index_select(initial_state, 0, layout.order, out=states[:N])
    after, S = states[N:].view(B, K, V), states[:N].view(N * H, K, V)
    read_out, Vt = X.new_empty(B, s * C, V), X.new_empty(B, C, V)
    pieces = layout.by_step(X.view(B, s * C, K), columns.mT, P, write, read_out, Vt, after, decay.pre, decay.post)
    for rows, columns_T, inverse, wanted, read, written, S1, pre, post in pieces:
        S = S[: len(S1)]
        torch.bmm(rows, S, out=read)
        torch.bmm(inverse, wanted - read[:, :C], out=written)
        torch.baddbmm(S if pre is None else S * pre, columns_T, written, out=S1)
        S = S1 if post is None else S1.mul_(post)
    o_BCV = None if s == 1 else torch.baddbmm(read_out[:, C:], scores[:, 1], Vt)
    return o_BCV, P, scores, Vt, states


def _backward(
    layout: Layout,
    p: Prologue,
    decay: Decay,
    P: Tensor,
    scores: Tensor,
    Vt: Tensor,
    states: Tensor,
    dO: Tensor | None,
    d_final: Tensor | None,
    d_cuts: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients dx [B,s,C,K] (of beta k and q), dk (of k as a column and inside beta k), dv, dg, dbeta, d_initial."""
    X, columns = _rows_and_columns(p, decay)
    (B, s, C, K), V, m = X.shape, Vt.shape[-1], layout.chunks
    G, d_after, d_initial = _backward_states(layout, X, columns, decay, P, scores, V, dO, d_final, d_cuts)
    G, entering = G.view(B, s * C, V), states[:m] if layout.enter is None else states.index_select(0, layout.enter)
    d_scores = _mask(torch.bmm(G, Vt.mT).view(B, s, C, C))
    dX = torch.bmm(G, entering.view(B, K, V).mT)
    d_columns = torch.bmm(Vt, (d_after if decay.post is None else d_after * decay.post).mT)
    by_tiles = [
        pairs.decayed_products_backward(pairs.take(d_scores, index), *_wild_inputs(p, index), pairwise)
        for index, pairwise in decay.wild
    ]
    if decay.post is not None:
        for index, _ in decay.wild:
            assert index is not None  # some chunks are mild
            d_scores.index_fill_(0, index, 0)
        d_scores = d_scores.view(B, s * C, C)
        dX.baddbmm_(d_scores, columns)
        d_columns.baddbmm_(d_scores.mT, X.view(B, s * C, K))
    # The gradient of the running sum of g, from the very factors that were multiplied: a pair adds at its row what
    # it takes away at its column, and what is left can be smaller by the whole decay (kernels.md 6.2).
    dX = dX.view(B, s, C, K)
    dG = X[:, 0] * dX[:, 0]
    if s == 2:
        dG.addcmul_(X[:, 1], dX[:, 1])
    dG.addcmul_(columns, d_columns, value=-1)
    dG[:, -1] += (d_after.mul_(states[-m:].view(B, K, V))).sum(-1)
    dg = torch.matmul(_ones_below(C, 0, dG.dtype, dG.device).T, dG)
    dx, dk = dX.mul_(decay.Gam[:, None]), d_columns.mul_(decay.column_scale)
    for (index, _), grads in zip(decay.wild, by_tiles, strict=True):
        for total, part in zip((dx, dk, dg), grads, strict=True):
            total.add_(part) if index is None else total.index_add_(0, index, part)
    minus_Y, used = G[:, :C], X[:, 0]  # X has served: its first half takes the products that are only summed
    dbeta = torch.mul(dx[:, 0], p.k, out=used).sum(-1, keepdim=True)
    dbeta -= (minus_Y * p.v).sum(-1, keepdim=True)
    return dx, dk.addcmul_(dx[:, 0], p.beta), minus_Y * p.beta.neg(), dg, dbeta, d_initial


def _backward_states(
    layout: Layout,
    X: Tensor,
    columns: Tensor,
    decay: Decay,
    P: Tensor,
    scores: Tensor,
    V: int,
    dO: Tensor | None,
    d_final: Tensor | None,
    d_cuts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The serial part, backwards: (G = [-Y; dO] [B,s,C,V], gradient of S1 [B,K,V], gradient of the initial state).

    Y is the gradient of beta v - X+_k S0.
    """
    (B, s, C, K), H, N = X.shape, layout.heads, len(layout.order)
    dS_N = X.new_zeros(N, H, K, V) if d_final is None else d_final.index_select(0, layout.order)
    d_after, running = X.new_zeros(B, K, V), dS_N.view(N * H, K, V)
    if d_cuts is not None:
        # A cut is a state after a chunk, so it lies behind the N initial states.
        d_after.view(-1, H, K, V).index_add_(0, layout.cuts - N, d_cuts)
    if dO is not None:
        G = X.new_empty(B, s, C, V)
        G[:, 1] = dO
        from_outputs = torch.bmm(scores[:, 1].mT, G[:, 1])
    else:
        G, from_outputs = X.new_zeros(B, s, C, V), X.new_zeros(B, C, V)
    pieces = layout.by_step(
        X.view(B, s * C, K).mT, columns, P.mT, from_outputs, G.view(B, s * C, V), d_after, decay.pre, decay.post
    )
    for rows_T, columns_n, inverse_T, from_output, G_n, dS1, pre, post in reversed(list(pieces)):
        dS = running[: len(dS1)]
        dS1.add_(dS)
        torch.mul(dS1, post, out=dS) if post is not None else dS.copy_(dS1)
        G_n[:, :C] = torch.bmm(inverse_T, torch.baddbmm(from_output, columns_n, dS)).neg_()
        if pre is not None:
            dS.mul_(pre)
        dS.baddbmm_(rows_T, G_n)
    d_initial = torch.empty_like(dS_N)
    d_initial[layout.order] = dS_N
    return G, d_after, d_initial
