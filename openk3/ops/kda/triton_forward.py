"""KDA forward in Triton: factors of every chunk at once, then the state through the chunks (kernels.md 4.1, 4.5, 5.2).

`factor_kernel` (one program a chunk and head) normalises q and k, opens the gate and writes, with G the running sum of
the log decay in the chunk and Gam = exp(G),

    K+ = k Gam     Q+ = q Gam     Ke = k Gam_C / Gam     A = tril(Q+ K-^T)     L = beta tril(K+ K-^T, -1)

and `inverse_kernel` makes B = (I + L)^-1 diag(beta) of L, in place.

`scan_kernel` walks a span with the state TRANSPOSED, S^T [rows of V, K], in the accumulators of the tensor cores:

    X^T = V^T - S^T K+^T      Vt^T = X^T B^T      O^T = S^T Q+^T + Vt^T A^T      S^T <- S^T diag(Gam_C) + Vt^T Ke

so that every left operand is a product of the step before and stays in registers; only factors come from memory.
Rows of S^T are independent, hence the split over programs. Segments: rows that start from the identity instead of
zero, with v = 0, come out as M^T, the exact map of the span; `fold_kernel` composes the maps in float32 precision, and
a second scan with the true states writes the outputs.

bf16 operands alone miss the tolerance on slow gates with large beta, and for near-parallel keys. Emulated over 1,536
tokens, beta logits N(3,1): 0.0058 plain, 0.0048 with Ke and Vt in two parts, 0.0039 with X and B in two parts as well.
For near-parallel keys (noise 0.02, beta 1) the output needs Vt in two parts too: 0.0131 without, 0.0104 with.

Legend: T tokens, N sequences, H heads, K key and V value channels, C tokens of a chunk, OP the operand type.
"""

import triton
import triton.language as tl


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x; FAST is one instruction, flushing what is below 1e-38, where the general form spends four on it."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1 / x, within one unit in the last place."""
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def unit_rows(x, EPS: tl.constexpr):
    """(x / |x|, 1 / |x|) of each row."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) + EPS)
    return x * inverse[:, None], inverse


@triton.jit
def split(x, OP: tl.constexpr):
    """x as the sum of two operands."""
    high = x.to(OP)
    return high, (x - high.to(tl.float32)).to(OP)


@triton.jit
def store_split(to_high, to_low, x, OP: tl.constexpr):
    """x as the sum of two operands, stored."""
    high, low = split(x, OP)
    tl.store(to_high, high)
    tl.store(to_low, low)


@triton.jit
def factor_kernel(
    q,
    k,
    z,
    beta,
    A_log,
    dt_bias,
    work,
    decay,
    chunk_table,
    max_chunks,
    h0,
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
    C: tl.constexpr,
    EPS: tl.constexpr,
    HAS_Q: tl.constexpr,
    OP: tl.constexpr,
):
    """Grid (max_chunks, heads of this group). work OP [heads, chunks, 4 C K + 3 C C], decay fp32 [heads, chunks, 3, K]:
    Gam_C, and the log decay, base 2, to the middle and to the end of the chunk."""
    FAST: tl.constexpr = tl.bfloat16 == OP
    chunk = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64)
    h = local + h0
    first = tl.load(chunk_table + chunk * 2).to(tl.int64)
    length = tl.load(chunk_table + chunk * 2 + 1)
    if length == 0:
        return
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    live = row < length
    live2 = live[:, None]
    token = (first + row)[:, None]
    to_k, _ = unit_rows(tl.load(k + token * k_t + h * k_h + channel[None, :], live2, 0.0).to(tl.float32), EPS)
    g = tl.load(z + token * z_t + h * z_h + channel[None, :], live2, 0.0).to(tl.float32)
    b = tl.load(beta + (first + row) * b_t + h * b_h, live, 0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32)) * -1.4426950408889634
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)
    g = (lower_bound * 1.4426950408889634) * reciprocal(1.0 + exp2(rate * (g + bias[None, :]), FAST), FAST)
    b = reciprocal(1.0 + exp2(b * -1.4426950408889634, FAST), FAST)
    g = tl.where(live2, g, 0.0)  # base 2 from here on
    b = tl.where(live, b, 0.0)
    end = tl.sum(g, 0)
    middle = tl.sum(tl.where(row[:, None] < C // 2, g, 0.0), 0)
    E = exp2(tl.cumsum(g, 0) - middle[None, :], FAST)
    inverse_E = reciprocal(E, FAST)
    to_end = exp2(end - middle, FAST)
    to_middle = exp2(middle, FAST)

    base = work + (local * max_chunks + chunk) * (4 * C * K + 3 * C * C)
    at = row[:, None] * K + channel[None, :]
    tile = row[:, None] * C + row[None, :]
    rows = to_k * E
    columns = to_k * inverse_E
    tl.store(base + at, (rows * to_middle[None, :]).to(OP))
    store_split(base + 2 * C * K + at, base + 3 * C * K + at, columns * to_end[None, :], OP)
    to_decay = decay + (local * max_chunks + chunk) * (3 * K) + channel
    tl.store(to_decay, exp2(end, FAST))
    tl.store(to_decay + K, middle)
    tl.store(to_decay + 2 * K, end)
    columns_T = tl.trans(columns.to(OP))
    N = tl.dot(rows.to(OP), columns_T)
    L = tl.where(row[:, None] > row[None, :], N * b[:, None], 0.0)
    store_split(base + 4 * C * K + tile, base + 4 * C * K + C * C + tile, L, OP)
    if HAS_Q:
        to_q, _ = unit_rows(tl.load(q + token * q_t + h * q_h + channel[None, :], live2, 0.0).to(tl.float32), EPS)
        q_rows = to_q * (E * scale)
        tl.store(base + C * K + at, (q_rows * to_middle[None, :]).to(OP))
        A = tl.dot(q_rows.to(OP), columns_T)
        tl.store(base + 4 * C * K + 2 * C * C + tile, tl.where(row[:, None] >= row[None, :], A, 0.0).to(OP))


@triton.jit
def running_sum(x, C: tl.constexpr, OP: tl.constexpr, REVERSE: tl.constexpr):
    """Sums over the rows up to each one (REVERSE: from each one on), [C, K], in float32: x in three parts, times ones.

    Where the result is wanted in the layout of products this is cheaper than `tl.cumsum`. Two parts do not suffice for
    the gradient of the decay on strong gates: what is left after it cancels is e^-5 of its terms.
    """
    row = tl.arange(0, C)
    up_to = row[:, None] <= row[None, :] if REVERSE else row[:, None] >= row[None, :]
    ones = tl.where(up_to, 1.0, 0.0).to(OP)
    high, low = split(x, OP)
    rest = (x - high.to(tl.float32) - low.to(tl.float32)).to(OP)
    return tl.dot(ones, high, tl.dot(ones, low, tl.dot(ones, rest)))


@triton.jit
def inverse_of_half(L, HALF: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [16, 16], as (I - L)(I + L^2)(I + L^4)(I + L^8).

    The product cancels badly for near-parallel keys: IEEE float32 carries it, no tensor-core format does
    (kernels.md 4.3).
    """
    at = tl.arange(0, HALF)
    X = tl.where(at[:, None] == at[None, :], 1.0, 0.0) - L
    for _ in tl.static_range(3):
        L = tl.dot(L, L, input_precision="ieee")
        X += tl.dot(X, L, input_precision="ieee")
    return X


@triton.jit
def inverse_kernel(
    work,
    beta,
    chunk_table,
    max_chunks,
    h0,
    b_t,
    b_h,
    K: tl.constexpr,
    C: tl.constexpr,
    OP: tl.constexpr,
):
    """Grid (max_chunks, heads): L, in two parts, becomes B = (I + L)^-1 diag(beta), likewise.

    One warp a program: the twelve dependent products of 16 x 16 tiles wait on each other, and without a barrier in
    between many such programs share a multiprocessor. At 8,192 tokens and 96 heads on an H200 the two kernels take
    0.70 + 0.19 ms; as one, which held its registers meanwhile, they took 1.07.
    """
    FAST: tl.constexpr = OP == tl.bfloat16
    HALF: tl.constexpr = C // 2
    chunk = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1).to(tl.int64)
    first = tl.load(chunk_table + chunk * 2).to(tl.int64)
    length = tl.load(chunk_table + chunk * 2 + 1)
    if length == 0:
        return
    row = tl.arange(0, HALF)
    high = work + (local * max_chunks + chunk) * (4 * C * K + 3 * C * C) + 4 * C * K
    low = high + C * C
    upper = row[:, None] * C + row[None, :]
    lower = upper + HALF * C + HALF
    corner = upper + HALF * C
    to_b = beta + (first + row) * b_t + (local + h0) * b_h
    b_up = tl.load(to_b, row < length, 0.0).to(tl.float32) * -1.4426950408889634
    b_low = tl.load(to_b + HALF * b_t, row + HALF < length, 0.0).to(tl.float32) * -1.4426950408889634
    b_up = tl.where(row < length, reciprocal(1.0 + exp2(b_up, FAST), FAST), 0.0)
    b_low = tl.where(row + HALF < length, reciprocal(1.0 + exp2(b_low, FAST), FAST), 0.0)
    X_up = inverse_of_half(tl.load(high + upper).to(tl.float32) + tl.load(low + upper).to(tl.float32), HALF)
    X_low = inverse_of_half(tl.load(high + lower).to(tl.float32) + tl.load(low + lower).to(tl.float32), HALF)
    X_corner = tl.load(high + corner).to(tl.float32) + tl.load(low + corner).to(tl.float32)
    X_corner = -tl.dot(X_low, tl.dot(X_corner, X_up, input_precision="ieee"), input_precision="ieee")
    store_split(high + upper, low + upper, X_up * b_up[None, :], OP)
    store_split(high + lower, low + lower, X_low * b_low[None, :], OP)
    store_split(high + corner, low + corner, X_corner * b_up[None, :], OP)


@triton.jit
def scan_kernel(
    work,
    decay,
    v,
    o,
    span_table,
    first_span,
    first_piece,
    start,
    final,
    at_offsets,
    max_chunks,
    h0,
    H,
    v_t,
    v_h,
    o_t,
    o_h,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    OP: tl.constexpr,
    FIELDS: tl.constexpr,
    MODE: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (row blocks, heads of this group, spans or sequences); R rows of S^T a program.

    MODE "whole": a program walks all spans of its sequence; `start` and `final` [N,H,K,V], `at_offsets` [n,H,K,V].
    MODE "maps": one span, from zero and, rows V.., from the identity; `final` [spans, heads, V+K, K] = [S^T; M^T].
    MODE "spans": one span, from the true states that `fold_kernel` left in the S^T rows of `start`; states that the
    span ends at go to `final` and `at_offsets`, so that a sequence of one span has the bits of mode "whole".
    """
    block = tl.program_id(0)
    local = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    h = local + h0
    if MODE == "whole":
        piece, next_piece = n, n + 1
        if HAS_OFFSETS:
            piece = tl.load(first_piece + n).to(tl.int64)
            next_piece = tl.load(first_piece + n + 1).to(tl.int64)
        span_from = tl.load(first_span + piece)
        span_to = tl.load(first_span + next_piece)
    else:
        if tl.load(span_table + n * FIELDS + 1) == 0:
            return
        span_from = n.to(tl.int32)
        span_to = span_from + 1

    r = block * R + tl.arange(0, R)
    c = tl.arange(0, C)
    channel = tl.arange(0, K)
    at = c[:, None] * K + channel[None, :]
    tile = c[:, None] * C + c[None, :]
    by_row = (n * tl.num_programs(1) + local) * ((V + K) * K) + r[:, None] * K + channel[None, :]
    by_column = channel[None, :] * V + r[:, None]
    S = tl.zeros([R, K], tl.float32)
    if MODE == "maps":
        S = tl.where(r[:, None] - V == channel[None, :], 1.0, S)
    elif MODE == "spans":
        S = tl.load(start + by_row)
    elif HAS_START:
        S = tl.load(start + (n * H + h) * (K * V) + by_column).to(tl.float32)

    for span in range(span_from, span_to):
        first = tl.load(span_table + span * FIELDS).to(tl.int64)
        length = tl.load(span_table + span * FIELDS + 1)
        chunk = tl.load(span_table + span * FIELDS + 2).to(tl.int64)
        factors = work + (local * max_chunks + chunk) * (4 * C * K + 3 * C * C)
        decays = decay + (local * max_chunks + chunk) * (3 * K) + channel
        for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
            f = factors + i * (4 * C * K + 3 * C * C)
            K_plus = tl.load(f + at)
            Ke = tl.load(f + 2 * C * K + at)
            Ke_low = tl.load(f + 3 * C * K + at)
            B = tl.load(f + 4 * C * K + tile)
            B_low = tl.load(f + 4 * C * K + C * C + tile)
            kept = tl.load(decays + i * (3 * K))
            live = (i * C + c < length)[:, None]
            token = (first + i * C + c)[:, None]
            X = tl.load(v + token * v_t + h * v_h + r[None, :], live & (r < V)[None, :], 0.0)
            X = tl.trans(X).to(tl.float32)
            S_op = S.to(OP)
            X -= tl.dot(S_op, tl.trans(K_plus))
            high, low = split(X, OP)
            Vt = tl.dot(high, tl.trans(B))
            Vt = tl.dot(low, tl.trans(B), Vt)
            Vt = tl.dot(high, tl.trans(B_low), Vt)
            high, low = split(Vt, OP)
            if MODE != "maps":
                Q_plus = tl.load(f + C * K + at)
                A = tl.load(f + 4 * C * K + 2 * C * C + tile)
                out = tl.dot(S_op, tl.trans(Q_plus))
                out = tl.dot(high, tl.trans(A), out)
                out = tl.dot(low, tl.trans(A), out)
                tl.store(o + token * o_t + h * o_h + r[None, :], tl.trans(out).to(o.dtype.element_ty), live)
            S = S * kept[None, :]
            S = tl.dot(high, Ke, S)
            S = tl.dot(low, Ke, S)
            S = tl.dot(high, Ke_low, S)
        if MODE != "maps" and HAS_OFFSETS:
            offset = tl.load(span_table + span * FIELDS + 3).to(tl.int64)
            if offset >= 0:
                tl.store(at_offsets + (offset * H + h) * (K * V) + by_column, S)
        if MODE == "spans":
            ends = tl.load(span_table + span * FIELDS + 4).to(tl.int64)
            if ends >= 0:
                tl.store(final + (ends * H + h) * (K * V) + by_column, S)
    if MODE == "whole":
        tl.store(final + (n * H + h) * (K * V) + by_column, S)
    elif MODE == "maps":
        tl.store(final + by_row, S)


@triton.jit
def fold_kernel(
    maps,
    span_table,
    first_span,
    first_piece,
    start,
    final,
    at_offsets,
    h0,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    AS_MAP: tl.constexpr,
):
    """S <- M S + Sh over the spans of each sequence, leaving the state each span starts from in place of its Sh.

    Grid (row blocks, heads of this group, N). AS_MAP: nothing is left; from zero and the identity, the map of the
    whole sequence goes to `final` [N, H, V + K, K] (rows as in `maps`). bf16 chains drift here: tf32x3 products.
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    local = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    h = local + h0
    channel = tl.arange(0, K)
    piece, next_piece = n, n + 1
    if HAS_OFFSETS:
        piece = tl.load(first_piece + n).to(tl.int64)
        next_piece = tl.load(first_piece + n + 1).to(tl.int64)
    by_row = r[:, None] * K + channel[None, :]
    by_column = channel[None, :] * V + r[:, None]
    S = tl.zeros([R, K], tl.float32)
    if AS_MAP:
        S = tl.where(r[:, None] - V == channel[None, :], 1.0, S)
    elif HAS_START:
        S = tl.load(start + (n * H + h) * (K * V) + by_column).to(tl.float32)
    transition = V * K + channel[:, None] * K + channel[None, :]
    heads = tl.num_programs(1)
    for span in range(tl.load(first_span + piece), tl.load(first_span + next_piece)):
        here = maps + (span * heads + local) * ((V + K) * K)
        M_T = tl.load(here + transition)
        S_new = tl.load(here + by_row, (r < V)[:, None], 0.0)
        S_new = tl.dot(S, M_T, S_new, input_precision="tf32x3")
        if not AS_MAP:
            tl.store(here + by_row, S)
        S = S_new
        if HAS_OFFSETS:
            offset = tl.load(span_table + span * FIELDS + 3).to(tl.int64)
            if offset >= 0:
                tl.store(at_offsets + (offset * H + h) * (K * V) + by_column, S)
    if AS_MAP:
        tl.store(final + (n * H + h) * ((V + K) * K) + by_row, S)
    else:
        tl.store(final + (n * H + h) * (K * V) + by_column, S)
