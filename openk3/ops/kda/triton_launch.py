"""Launch sizes, workspace and order of the Triton kernels of KDA (kernels.md 3.1, 3.7, 5.2, 6.4).

Nothing here reads device memory from the host, so every call can be captured in a CUDA graph: launch sizes depend on
T, N and H alone. Legend: T tokens, N sequences, H heads, K key and V value channels.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from openk3.ops.kda.triton_backward import (
    gate_kernel,
    key_kernel,
    overlap_kernel,
    query_kernel,
    reverse_kernel,
    save_kernel,
)
from openk3.ops.kda.triton_common import CHUNK, EPS, OPERAND, SPAN_FIELDS, Plan
from openk3.ops.kda.triton_forward import factor_kernel, fold_kernel, inverse_kernel, scan_kernel

WORKSPACE_BYTES = 4 << 30  # more than this and the heads are done in groups
ROWS, SCAN_WARPS, STAGES = 64, 4, 2  # rows of S^T a program: one warpgroup
SAVE_STAGES = 2
FACTOR_WARPS = 4
FACTOR_REGISTERS = 168  # a third program a multiprocessor: 0.70 ms for 0.81 at 8,192 tokens and 96 heads
QUERY = {"BLOCK_V": 32, "STAGES": 2, "num_warps": 4}
KEY = {"BLOCK_V": 32, "STAGES": 2, "num_warps": 4}
FOLD_ROWS, FOLD_WARPS = 16, 8
NO_SEGMENTS = 1 << 30


class Tokens(NamedTuple):
    """The token inputs of one call: q, k [T,H,K], v [T,H,V], decay logits z [T,H,K] and beta logits [T,H], A_log [H],
    dt_bias [H,K], with the gate's bound and the scale of q."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    z: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float
    scale: float

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (*self.k.shape, self.v.shape[-1])

    @property
    def operand(self):
        """bf16 on the tensor cores; float32 in the interpreter and for float32 inputs."""
        return OPERAND[self.k.dtype]


class Work(NamedTuple):
    """Factors of a group of heads, which successive groups share."""

    group: int
    factors: Tensor
    decay: Tensor


def segment_rule(H: int, V: int, K: int) -> tuple[int, int]:
    """(shortest segment in tokens, most segments a sequence): as if the sequence stood alone, so that its bits do not
    depend on its neighbours. Segments pay where both row sets of its heads leave multiprocessors idle."""
    blocks = H * (V + K) // ROWS
    most = min(528 // blocks, 40) if blocks <= 88 else 1  # 11 at 12 heads; past 40 the fold costs what the scan saves
    return (512, most) if most > 1 else (NO_SEGMENTS, 1)


def make_work(x: Tokens, plan: Plan, extra_numbers: int = 0) -> Work:
    """Factors of one chunk and head, plus what else the caller keeps of it, decide how many heads go at a time."""
    _, H, K, _ = x.sizes
    numbers, size = 4 * CHUNK * K + 3 * CHUNK * CHUNK, x.k.element_size()
    total = H * plan.max_chunks * (numbers + extra_numbers) * size
    groups = max(1, min(triton.cdiv(total, WORKSPACE_BYTES), H))
    group = triton.cdiv(H, groups)
    factors = torch.empty(group * plan.max_chunks * numbers, dtype=x.k.dtype, device=x.k.device)
    decay = torch.empty(group * plan.max_chunks * 3 * K, dtype=torch.float32, device=x.k.device)
    return Work(group, factors, decay)


def run_factors(x: Tokens, plan: Plan, work: Work, h0: int, heads: int) -> None:
    """factor_kernel and inverse_kernel for heads h0 .. h0 + heads - 1."""
    q = x.k if x.q is None else x.q
    factor_kernel[(plan.max_chunks, heads)](
        q,
        x.k,
        x.z,
        x.beta,
        x.A_log,
        x.dt_bias,
        work.factors,
        work.decay,
        plan.chunk_table,
        plan.max_chunks,
        h0,
        *q.stride()[:2],
        *x.k.stride()[:2],
        *x.z.stride()[:2],
        *x.beta.stride(),
        x.scale,
        x.lower_bound,
        K=x.k.shape[-1],
        C=CHUNK,
        EPS=EPS,
        HAS_Q=x.q is not None,
        OP=x.operand,
        num_warps=FACTOR_WARPS,
        maxnreg=FACTOR_REGISTERS,
    )
    inverse_kernel[(plan.max_chunks, heads)](
        work.factors,
        x.beta,
        plan.chunk_table,
        plan.max_chunks,
        h0,
        *x.beta.stride(),
        K=x.k.shape[-1],
        C=CHUNK,
        OP=x.operand,
        num_warps=1,
    )


def forward(
    x: Tokens,
    cu_seqlens: Tensor,
    start: Tensor | None,
    offsets: Tensor | None,
    segments: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o [T,H,V], final state [N,H,K,V], states at the offsets [n,H,K,V]); one row per DISTINCT offset is written."""
    T, H, K, V = x.sizes
    N, device = cu_seqlens.numel() - 1, x.k.device
    min_segment, most = segment_rule(H, V, K)
    if segments and most == 1:
        min_segment, most = 512, 8
    if segments is False or 2 * min_segment > T:  # no sequence of so few tokens has two segments
        min_segment, most = NO_SEGMENTS, 1
    plan = Plan(cu_seqlens, T, offsets, min_segment, most)
    work = make_work(x, plan)
    o = torch.empty(T, H, V, dtype=x.v.dtype, device=device)
    final = torch.empty(N, H, K, V, dtype=torch.float32, device=device)
    states = final.new_empty(0 if offsets is None else len(offsets), H, K, V)
    maps = final.new_empty(plan.max_spans * work.group * (V + K) * K if most > 1 else 0)
    origin = final if start is None else start
    shared = {
        "K": K,
        "V": V,
        "FIELDS": SPAN_FIELDS,
        "HAS_START": start is not None,
        "HAS_OFFSETS": plan.has_offsets,
    }
    spans = plan.span_table, plan.first_span, plan.first_piece

    def scan(mode: str, rows: int, programs: int, begin: Tensor, to: Tensor, h0: int, heads: int) -> None:
        scan_kernel[(rows // ROWS, heads, programs)](
            work.factors,
            work.decay,
            x.v,
            o,
            *spans,
            begin,
            to,
            states,
            plan.max_chunks,
            h0,
            H,
            *x.v.stride()[:2],
            *o.stride()[:2],
            R=ROWS,
            C=CHUNK,
            OP=x.operand,
            MODE=mode,
            STAGES=STAGES,
            num_warps=SCAN_WARPS,
            **shared,
        )

    for h0 in range(0, H, work.group):
        heads = min(work.group, H - h0)
        run_factors(x, plan, work, h0, heads)
        if most == 1:
            scan("whole", V, N, origin, final, h0, heads)
            continue
        scan("maps", V + K, plan.max_spans, maps, maps, h0, heads)
        fold_kernel[(V // FOLD_ROWS, heads, N)](
            maps, *spans, origin, final, states, h0, H, R=FOLD_ROWS, AS_MAP=False, num_warps=FOLD_WARPS, **shared
        )
        scan("spans", V, plan.max_spans, maps, final, h0, heads)
    return o, final, states


def segment_maps(x: Tokens, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(M [N,H,K,K], S [N,H,K,V]) in float32: the affine map of every sequence."""
    T, H, K, V = x.sizes
    N = cu_seqlens.numel() - 1
    plan = Plan(cu_seqlens, T, None, *segment_rule(H, V, K))
    work = make_work(x, plan)
    whole = torch.empty(N, H, V + K, K, dtype=torch.float32, device=x.k.device)
    maps = whole.new_empty(plan.max_spans * work.group * (V + K) * K)
    spans = plan.span_table, plan.first_span, plan.first_piece
    shared = {"K": K, "V": V, "FIELDS": SPAN_FIELDS, "HAS_START": False, "HAS_OFFSETS": False}
    for h0 in range(0, H, work.group):
        heads = min(work.group, H - h0)
        run_factors(x, plan, work, h0, heads)
        scan_kernel[((V + K) // ROWS, heads, plan.max_spans)](
            work.factors,
            work.decay,
            x.v,
            x.v,
            *spans,
            maps,
            maps,
            maps,
            plan.max_chunks,
            h0,
            H,
            *x.v.stride()[:2],
            0,
            0,
            R=ROWS,
            C=CHUNK,
            OP=x.operand,
            MODE="maps",
            STAGES=STAGES,
            num_warps=SCAN_WARPS,
            **shared,
        )
        fold_kernel[((V + K) // FOLD_ROWS, heads, N)](
            maps, *spans, whole, whole, whole, h0, H, R=FOLD_ROWS, AS_MAP=True, num_warps=FOLD_WARPS, **shared
        )
    S_T, M_T = whole.split([V, K], 2)
    return M_T.mT.contiguous(), S_T.mT.contiguous()


def backward(
    x: Tokens,
    cu_seqlens: Tensor,
    start: Tensor | None,
    offsets: Tensor | None,
    do: Tensor,
    d_final: Tensor | None,
    d_states: Tensor | None,
) -> tuple[Any, ...]:
    """Gradients of q, k, v, z, beta, A_log, dt_bias and the initial state (None without one), for gradients of o, of
    the final state and of the states at the offsets (one row per distinct offset)."""
    T, H, K, V = x.sizes
    N, device = cu_seqlens.numel() - 1, x.k.device
    plan = Plan(cu_seqlens, T, offsets if d_states is not None else None, NO_SEGMENTS, 1)
    work = make_work(x, plan, extra_numbers=2 * K * V + V * CHUNK)
    chunks, dtype = plan.max_chunks, x.k.dtype
    dq, dk, dv, dz, d_beta = (torch.empty(y.shape, dtype=y.dtype, device=device) for y in x[:5])
    parts = torch.empty(2, chunks, H, K, dtype=torch.float32, device=device)
    d_start = None if start is None else torch.empty(N, H, K, V, dtype=torch.float32, device=device)
    before, after = torch.empty(2, work.group * chunks * K * V, dtype=dtype, device=device)
    writes = torch.empty(work.group * chunks * V * CHUNK, dtype=dtype, device=device)
    spans = plan.span_table, plan.first_span, plan.first_piece
    shared = {"K": K, "V": V, "C": CHUNK, "OP": x.operand}
    walk = {"R": ROWS, "FIELDS": SPAN_FIELDS, "HAS_OFFSETS": plan.has_offsets, "STAGES": SAVE_STAGES, "num_warps": 4}
    for h0 in range(0, H, work.group):
        heads = min(work.group, H - h0)
        run_factors(x, plan, work, h0, heads)
        save_kernel[(V // ROWS, heads, N)](
            work.factors,
            work.decay,
            x.v,
            before,
            writes,
            *spans,
            before if start is None else start,
            chunks,
            h0,
            H,
            *x.v.stride()[:2],
            HAS_START=start is not None,
            **shared,
            **walk,
        )
        reverse_kernel[(V // ROWS, heads, N)](
            work.factors,
            work.decay,
            do,
            dv,
            after,
            *spans,
            do if d_final is None else d_final,
            do if d_states is None else d_states,
            do if d_start is None else d_start,
            chunks,
            h0,
            H,
            *do.stride()[:2],
            HAS_FINAL=d_final is not None,
            HAS_START=start is not None,
            **shared,
            **walk,
        )
        logits = x.A_log, x.dt_bias, work.factors, work.decay
        strides = (*x.q.stride()[:2], *x.k.stride()[:2], *x.z.stride()[:2])
        query_kernel[(chunks, heads)](
            x.q,
            x.k,
            x.z,
            *logits,
            before,
            writes,
            do,
            dq,
            plan.chunk_table,
            chunks,
            h0,
            H,
            *strides,
            *do.stride()[:2],
            x.scale,
            x.lower_bound,
            EPS=EPS,
            **QUERY,
            **shared,
        )
        overlap_kernel[(chunks, heads)](work.decay, before, after, plan.chunk_table, chunks, K=K, V=V, num_warps=4)
        key_kernel[(chunks, heads)](
            x.q,
            x.k,
            x.z,
            x.beta,
            *logits,
            before,
            writes,
            dv,
            after,
            dk,
            dz,
            d_beta,
            *parts,
            plan.chunk_table,
            chunks,
            h0,
            H,
            *strides,
            *x.beta.stride(),
            x.scale,
            x.lower_bound,
            EPS=EPS,
            **KEY,
            **shared,
        )
        gate_kernel[(chunks, heads)](
            x.z,
            *logits,
            dz,
            *parts,
            plan.chunk_table,
            chunks,
            h0,
            H,
            *x.z.stride()[:2],
            x.lower_bound,
            K=K,
            C=CHUNK,
            OP=x.operand,
            num_warps=4,
        )
    d_bias, d_rate = parts.sum(1)
    return dq, dk, dv, dz, d_beta, d_rate.sum(1), d_bias, d_start
