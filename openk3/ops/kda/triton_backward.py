"""KDA backward in Triton, recomputing (kernels.md 6): forward states, reverse states, then all chunks at once.

1. `factor_kernel` again, then `save_kernel`: the forward scan without outputs, leaving S0^T and Vt^T of every chunk.
2. `reverse_kernel`: dS^T in the accumulators, from the last chunk to the first, leaving dS1^T of every chunk and
   dV = dX = B^T (A^T dO + Ke dS1).
3. `query_kernel`, `overlap_kernel`, `key_kernel`, `gate_kernel`: everything else of a chunk, down to the gradients of
   the raw inputs. One kernel for all spilled registers: 6.9 ms at 8,192 tokens and 96 heads on an H200 against 4.5.

Two shortcuts. dN = -tril(dX Vt^T, -1) needs no Y. And since Vt_r = beta_r e_r and dX_r = beta_r Y_r, the gradient of
beta is dbeta_r = Y_r . e_r, one product of rows; of its logit, (dX_r . Vt_r) (1 - beta) / beta.

The gradient of the decay is a difference of large sums on strong gates. It is formed in float32 from the very numbers
that entered the products (kernels.md 6.2): each product contributes with its own rounded operands, and what a column
loses in one place a row gains in another. The term of the last row is taken as Gam_C S0 dS1 + sum_r Ke_r dKe_r.

Legend: T tokens, N sequences, H heads, K key and V value channels, C tokens of a chunk, OP the operand type.
"""

import triton
import triton.language as tl

from openk3.ops.kda.triton_forward import exp2, reciprocal, running_sum, split, unit_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def store_exact(to_high, to_low, x, OP: tl.constexpr):
    """The bits of a float32, in two places of type OP."""
    if OP == tl.float32:
        tl.store(to_high, x)
    else:
        bits = x.to(tl.int32, bitcast=True)
        tl.store(to_high, (bits >> 16).to(tl.int16).to(OP, bitcast=True))
        tl.store(to_low, bits.to(tl.int16).to(OP, bitcast=True))


@triton.jit
def load_exact(to_high, to_low, OP: tl.constexpr):
    """What `store_exact` stored."""
    if OP == tl.float32:
        return tl.load(to_high)
    else:
        high = tl.load(to_high).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(to_low).to(tl.int16, bitcast=True).to(tl.int32)
        return ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def spans_of_sequence(first_span, first_piece, n, HAS_OFFSETS: tl.constexpr):
    """[from, to) of the spans of sequence n."""
    piece, next_piece = n, n + 1
    if HAS_OFFSETS:
        piece = tl.load(first_piece + n).to(tl.int64)
        next_piece = tl.load(first_piece + n + 1).to(tl.int64)
    return tl.load(first_span + piece), tl.load(first_span + next_piece)


@triton.jit
def save_kernel(
    work,
    decay,
    v,
    states,
    writes,
    span_table,
    first_span,
    first_piece,
    start,
    max_chunks,
    h0,
    H,
    v_t,
    v_h,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    OP: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (V / R, heads, N). Before each chunk S^T to `states` [heads, chunks, V, K], its Vt^T to `writes`
    [heads, chunks, V, C]."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    local = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    h = local + h0
    c = tl.arange(0, C)
    channel = tl.arange(0, K)
    at = c[:, None] * K + channel[None, :]
    tile = c[:, None] * C + c[None, :]
    S = tl.zeros([R, K], tl.float32)
    if HAS_START:
        S = tl.load(start + (n * H + h) * (K * V) + channel[None, :] * V + r[:, None]).to(tl.float32)
    span_from, span_to = spans_of_sequence(first_span, first_piece, n, HAS_OFFSETS)
    for span in range(span_from, span_to):
        first = tl.load(span_table + span * FIELDS).to(tl.int64)
        length = tl.load(span_table + span * FIELDS + 1)
        chunk = local * max_chunks + tl.load(span_table + span * FIELDS + 2).to(tl.int64)
        for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
            f = work + (chunk + i) * (4 * C * K + 3 * C * C)
            K_plus = tl.load(f + at)
            Ke = tl.load(f + 2 * C * K + at)
            Ke_low = tl.load(f + 3 * C * K + at)
            B = tl.load(f + 4 * C * K + tile)
            B_low = tl.load(f + 4 * C * K + C * C + tile)
            kept = tl.load(decay + (chunk + i) * (3 * K) + channel)
            token = (first + i * C + c)[:, None]
            X = tl.load(v + token * v_t + h * v_h + r[None, :], (i * C + c < length)[:, None], 0.0)
            S_op = S.to(OP)
            tl.store(states + (chunk + i) * (V * K) + r[:, None] * K + channel[None, :], S_op)
            X = tl.trans(X).to(tl.float32) - tl.dot(S_op, tl.trans(K_plus))
            high, low = split(X, OP)
            Vt = tl.dot(high, tl.trans(B))
            Vt = tl.dot(low, tl.trans(B), Vt)
            Vt = tl.dot(high, tl.trans(B_low), Vt)
            high, low = split(Vt, OP)
            tl.store(writes + (chunk + i) * (V * C) + r[:, None] * C + c[None, :], high)
            S = S * kept[None, :]
            S = tl.dot(high, Ke, S)
            S = tl.dot(low, Ke, S)
            S = tl.dot(high, Ke_low, S)


@triton.jit
def reverse_kernel(
    work,
    decay,
    do,
    dv,
    d_states,
    span_table,
    first_span,
    first_piece,
    d_final,
    d_offsets,
    d_start,
    max_chunks,
    h0,
    H,
    do_t,
    do_h,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    OP: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (V / R, heads, N). After each chunk dS^T to `d_states` [heads, chunks, V, K]; dv [T, H, V];
    the gradient of the initial state to `d_start` [N, H, K, V]."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    local = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    h = local + h0
    c = tl.arange(0, C)
    channel = tl.arange(0, K)
    at = c[:, None] * K + channel[None, :]
    tile = c[:, None] * C + c[None, :]
    by_column = channel[None, :] * V + r[:, None]
    dS = tl.zeros([R, K], tl.float32)
    if HAS_FINAL:
        dS = tl.load(d_final + (n * H + h) * (K * V) + by_column).to(tl.float32)
    span_from, span_to = spans_of_sequence(first_span, first_piece, n, HAS_OFFSETS)
    for back in range(span_from, span_to):
        span = span_from + span_to - 1 - back
        first = tl.load(span_table + span * FIELDS).to(tl.int64)
        length = tl.load(span_table + span * FIELDS + 1)
        chunk = local * max_chunks + tl.load(span_table + span * FIELDS + 2).to(tl.int64)
        if HAS_OFFSETS:
            offset = tl.load(span_table + span * FIELDS + 3).to(tl.int64)
            if offset >= 0:
                dS += tl.load(d_offsets + (offset * H + h) * (K * V) + by_column).to(tl.float32)
        chunks = tl.cdiv(length, C)
        for j in tl.range(0, chunks, num_stages=STAGES):
            i = chunks - 1 - j
            f = work + (chunk + i) * (4 * C * K + 3 * C * C)
            K_plus = tl.load(f + at)
            Q_plus = tl.load(f + C * K + at)
            Ke = tl.load(f + 2 * C * K + at)
            B = tl.load(f + 4 * C * K + tile)
            A = tl.load(f + 4 * C * K + 2 * C * C + tile)
            kept = tl.load(decay + (chunk + i) * (3 * K) + channel)
            token = (first + i * C + c)[:, None]
            live = (i * C + c < length)[:, None]
            dO_T = tl.trans(tl.load(do + token * do_t + h * do_h + r[None, :], live, 0.0)).to(OP)
            dS_op = dS.to(OP)
            tl.store(d_states + (chunk + i) * (V * K) + r[:, None] * K + channel[None, :], dS_op)
            dVt = tl.dot(dS_op, tl.trans(Ke))
            dVt = tl.dot(dO_T, A, dVt)
            dX = tl.dot(dVt.to(OP), B).to(OP)
            tl.store(dv + (token * H + h) * V + r[None, :], tl.trans(dX).to(dv.dtype.element_ty), live)
            dS = dS * kept[None, :]
            dS = tl.dot(dO_T, Q_plus, dS)
            dS = tl.dot(-dX, K_plus, dS)
    if HAS_START:
        tl.store(d_start + (n * H + h) * (K * V) + by_column, dS)


@triton.jit
def overlap_kernel(
    decay,
    states,
    d_states,
    chunk_table,
    max_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Grid (max_chunks, heads): Gam_C rowsum(S0 dS1) in place of Gam_C. Apart from `key_kernel`, whose registers the
    two states would need at once."""
    chunk = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64)
    if tl.load(chunk_table + chunk * 2 + 1) == 0:
        return
    channel = tl.arange(0, K)
    at = (local * max_chunks + chunk) * (V * K) + tl.arange(0, V)[:, None] * K + channel[None, :]
    both = tl.sum(tl.load(states + at).to(tl.float32) * tl.load(d_states + at).to(tl.float32), 0)
    to_decay = decay + (local * max_chunks + chunk) * (3 * K) + channel
    tl.store(to_decay, tl.load(to_decay) * both)


@triton.jit
def unit_gradient(dy, y, inverse):
    """Gradient of y = x / |x|, by rows."""
    return (dy - y * tl.sum(dy * y, 1)[:, None]) * inverse[:, None]


@triton.jit
def opened_gate(
    z,
    A_log,
    dt_bias,
    h,
    token,
    z_t,
    z_h,
    channel,
    live2,
    lower_bound,
    K: tl.constexpr,
    FAST: tl.constexpr,
):
    """Log decay, base 2, zero past the end of the chunk."""
    rate = tl.exp(tl.load(A_log + h).to(tl.float32)) * -LOG2_E
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)
    logit = tl.load(z + token * z_t + h * z_h + channel[None, :], live2, 0.0).to(tl.float32) + bias[None, :]
    return tl.where(live2, (lower_bound * LOG2_E) * reciprocal(1.0 + exp2(rate * logit, FAST), FAST), 0.0)


@triton.jit
def query_kernel(
    q,
    k,
    z,
    A_log,
    dt_bias,
    work,
    decay,
    states,
    writes,
    do,
    dq,
    chunk_table,
    max_chunks,
    h0,
    H,
    q_t,
    q_h,
    k_t,
    k_h,
    z_t,
    z_h,
    do_t,
    do_h,
    scale,
    lower_bound,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    OP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (max_chunks, heads). dq [T, H, K]; for `key_kernel`, into places of `work` that are done with: dA in place
    of A, what q adds to dG, in two parts, in place of Q+ and the low part of Ke. One kernel for both spills."""
    FAST: tl.constexpr = OP == tl.bfloat16
    chunk = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64)
    h = local + h0
    first = tl.load(chunk_table + chunk * 2).to(tl.int64)
    length = tl.load(chunk_table + chunk * 2 + 1)
    if length == 0:
        return
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    live2 = (row < length)[:, None]
    token = (first + row)[:, None]
    f = work + (local * max_chunks + chunk) * (4 * C * K + 3 * C * C)
    at = row[:, None] * K + channel[None, :]
    at_state = states + (local * max_chunks + chunk) * (V * K)
    at_write = writes + (local * max_chunks + chunk) * (V * C)
    dA = tl.zeros([C, C], tl.float32)
    dQ_state = tl.zeros([C, K], tl.float32)
    for at_v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        wide = at_v + tl.arange(0, BLOCK_V)
        dO = tl.load(do + token * do_t + h * do_h + wide[None, :], live2, 0.0).to(OP)
        dA = tl.dot(dO, tl.load(at_write + wide[:, None] * C + row[None, :]), dA)
        dQ_state = tl.dot(dO, tl.load(at_state + wide[:, None] * K + channel[None, :]), dQ_state)
    dA = tl.where(row[:, None] >= row[None, :], dA, 0.0).to(OP)
    tl.store(f + 4 * C * K + 2 * C * C + row[:, None] * C + row[None, :], dA)
    g = opened_gate(z, A_log, dt_bias, h, token, z_t, z_h, channel, live2, lower_bound, K, FAST)
    middle = tl.load(decay + (local * max_chunks + chunk) * (3 * K) + K + channel)
    E = exp2(running_sum(g, C, OP, False) - middle[None, :], FAST)
    to_k, _ = unit_rows(tl.load(k + token * k_t + h * k_h + channel[None, :], live2, 0.0).to(tl.float32), EPS)
    dQ_inside = tl.dot(dA, (to_k * reciprocal(E, FAST)).to(OP))
    to_q, inverse = unit_rows(tl.load(q + token * q_t + h * q_h + channel[None, :], live2, 0.0).to(tl.float32), EPS)
    E *= scale
    dG = (to_q * E).to(OP).to(tl.float32) * dQ_inside + tl.load(f + C * K + at).to(tl.float32) * dQ_state
    tl.debug_barrier()
    store_exact(f + C * K + at, f + 3 * C * K + at, dG, OP)
    d_unit = E * (exp2(middle, FAST)[None, :] * dQ_state + dQ_inside)
    to = dq + (token * H + h) * K + channel[None, :]
    tl.store(to, unit_gradient(d_unit, to_q, inverse).to(dq.dtype.element_ty), live2)


@triton.jit
def key_kernel(
    q,
    k,
    z,
    beta,
    A_log,
    dt_bias,
    work,
    decay,
    states,
    writes,
    dv,
    d_states,
    dk,
    dz,
    d_beta,
    part_bias,
    part_rate,
    chunk_table,
    max_chunks,
    h0,
    H,
    q_t,
    q_h,
    k_t,
    k_h,
    z_t,
    z_h,
    b_t,
    b_h,
    scale,
    lower_bound,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    OP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (max_chunks, heads), after `query_kernel` and `overlap_kernel`. dk [T, H, K], d_beta [T, H]; for
    `gate_kernel`, the whole of dG in place of what q added to it, the term of the last row in place of Gam_C."""
    FAST: tl.constexpr = OP == tl.bfloat16
    chunk = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64)
    h = local + h0
    first = tl.load(chunk_table + chunk * 2).to(tl.int64)
    length = tl.load(chunk_table + chunk * 2 + 1)
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    if length == 0:
        return
    live = row < length
    live2 = live[:, None]
    token = (first + row)[:, None]
    f = work + (local * max_chunks + chunk) * (4 * C * K + 3 * C * C)
    at = row[:, None] * K + channel[None, :]
    tile = row[:, None] * C + row[None, :]
    to = (token * H + h) * K + channel[None, :]
    at_state = (local * max_chunks + chunk) * (V * K)
    at_write = writes + (local * max_chunks + chunk) * (V * C)

    dN = tl.zeros([C, C], tl.float32)
    dK_state = tl.zeros([C, K], tl.float32)
    dK_end = tl.zeros([C, K], tl.float32)
    for at_v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        wide = at_v + tl.arange(0, BLOCK_V)
        dX = tl.load(dv + (token * H + h) * V + wide[None, :], live2, 0.0).to(OP)
        Vt_T = tl.load(at_write + wide[:, None] * C + row[None, :])
        S0_T = tl.load(states + at_state + wide[:, None] * K + channel[None, :])
        dS1_T = tl.load(d_states + at_state + wide[:, None] * K + channel[None, :])
        dN = tl.dot(dX, Vt_T, dN)
        dK_state = tl.dot(dX, S0_T, dK_state)
        dK_end = tl.dot(tl.trans(Vt_T), dS1_T, dK_end)
    both = tl.sum(tl.where(row[:, None] == row[None, :], dN, 0.0), 1)
    b = tl.load(beta + (first + row) * b_t + h * b_h, live, 0.0).to(tl.float32)
    # (1 - beta) / beta = e^-logit; the bound keeps 0 * inf away where beta vanishes
    d_logit = both * tl.exp(tl.minimum(-b, 80.0))
    tl.store(d_beta + (first + row) * H + h, d_logit.to(d_beta.dtype.element_ty), live)
    dN = tl.where(row[:, None] > row[None, :], -dN, 0.0).to(OP)

    g = opened_gate(z, A_log, dt_bias, h, token, z_t, z_h, channel, live2, lower_bound, K, FAST)
    to_decay = decay + (local * max_chunks + chunk) * (3 * K) + channel
    middle = tl.load(to_decay + K)
    end = tl.load(to_decay + 2 * K)
    E = exp2(tl.cumsum(g, 0) - middle[None, :], FAST)
    given = tl.load(f + 2 * C * K + at).to(tl.float32) * dK_end
    last = tl.load(to_decay) + tl.sum(given, 0)
    dG = load_exact(f + C * K + at, f + 3 * C * K + at, OP) - given
    dG -= tl.load(f + at).to(tl.float32) * dK_state
    d_unit = reciprocal(E, FAST) * exp2(end - middle, FAST)[None, :] * dK_end
    d_unit -= E * exp2(middle, FAST)[None, :] * dK_state

    to_k, k_inverse = unit_rows(tl.load(k + token * k_t + h * k_h + channel[None, :], live2, 0.0).to(tl.float32), EPS)
    columns = (to_k * reciprocal(E, FAST)).to(OP)
    k_rows = (to_k * E).to(OP)
    d_rows = tl.dot(dN, columns)
    dG += k_rows.to(tl.float32) * d_rows
    d_unit += E * d_rows
    to_q, _ = unit_rows(tl.load(q + token * q_t + h * q_h + channel[None, :], live2, 0.0).to(tl.float32), EPS)
    q_rows = (to_q * (E * scale)).to(OP)
    d_columns = tl.dot(tl.trans(dN), k_rows)
    d_columns = tl.dot(tl.trans(tl.load(f + 4 * C * K + 2 * C * C + tile)), q_rows, d_columns)
    dG -= columns.to(tl.float32) * d_columns
    d_unit += reciprocal(E, FAST) * d_columns
    tl.store(dk + to, unit_gradient(d_unit, to_k, k_inverse).to(dk.dtype.element_ty), live2)

    tl.debug_barrier()
    store_exact(f + C * K + at, f + 3 * C * K + at, dG, OP)
    tl.store(to_decay, last)


@triton.jit
def gate_kernel(
    z,
    A_log,
    dt_bias,
    work,
    decay,
    dz,
    part_bias,
    part_rate,
    chunk_table,
    max_chunks,
    h0,
    H,
    z_t,
    z_h,
    lower_bound,
    K: tl.constexpr,
    C: tl.constexpr,
    OP: tl.constexpr,
):
    """Grid (max_chunks, heads), after `key_kernel`: from dG to the logits. dz [T, H, K]; float32 parts of the
    gradients of dt_bias [chunks, H, K] and A_log [chunks, H, K], to be summed in a fixed order."""
    FAST: tl.constexpr = OP == tl.bfloat16
    chunk = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64)
    h = local + h0
    first = tl.load(chunk_table + chunk * 2).to(tl.int64)
    length = tl.load(chunk_table + chunk * 2 + 1)
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    part = (chunk * H + h) * K + channel
    if length == 0:
        tl.store(part_bias + part, tl.zeros([K], tl.float32))
        tl.store(part_rate + part, tl.zeros([K], tl.float32))
        return
    live2 = (row < length)[:, None]
    token = (first + row)[:, None]
    at = work + (local * max_chunks + chunk) * (4 * C * K + 3 * C * C) + row[:, None] * K + channel[None, :]
    dG = load_exact(at + C * K, at + 3 * C * K, OP)
    last = tl.load(decay + (local * max_chunks + chunk) * (3 * K) + channel)
    dg = running_sum(dG, C, OP, True) + last[None, :]
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)
    logit = tl.load(z + token * z_t + h * z_h + channel[None, :], live2, 0.0).to(tl.float32) + bias[None, :]
    opened = reciprocal(1.0 + exp2((rate * -LOG2_E) * logit, FAST), FAST)
    d_logit = tl.where(live2, dg * (rate * lower_bound) * opened * (1.0 - opened), 0.0)
    tl.store(dz + (token * H + h) * K + channel[None, :], d_logit.to(dz.dtype.element_ty), live2)
    tl.store(part_bias + part, tl.sum(d_logit, 0))
    tl.store(part_rate + part, tl.sum(d_logit * logit, 0))
