"""One KDA step per slot of a state pool, in place (kernels.md 3.3, 7.1).

A program holds R value columns of one head's state, [K, R], in registers from the first token to the last. The read of
the decayed state by k and by q are one pass: o = S'^T q + (k.q) u with u = beta (v - S'^T k).

Legend: T = N M tokens, N entries with M tokens each, S slots, H heads, K key and V value channels.
"""

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    q,
    k,
    v,
    z,
    beta,
    A_log,
    dt_bias,
    state,
    slots,
    o,
    M,
    H,
    q_t,
    q_h,
    k_t,
    k_h,
    v_t,
    v_h,
    z_t,
    z_h,
    b_t,
    b_h,
    s_s,
    s_h,
    scale,
    lower_bound,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid (V / R, H, N). A slot below zero is skipped: zeros go to its rows of o [T, H, V], no state is touched."""
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * R + tl.arange(0, R)
    channel = tl.arange(0, K)
    slot = tl.load(slots + n).to(tl.int64)
    if slot < 0:
        for m in range(M):
            to = o + ((n * M + m) * H + h) * V + column
            tl.store(to, tl.zeros([R], o.dtype.element_ty))
        return
    at = state + slot * s_s + h * s_h + channel[:, None] * V + column[None, :]
    S = tl.load(at).to(tl.float32)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)
    for m in range(M):
        t = n * M + m
        to_k = tl.load(k + t * k_t + h * k_h + channel).to(tl.float32)
        to_q = tl.load(q + t * q_t + h * q_h + channel).to(tl.float32)
        g = tl.load(z + t * z_t + h * z_h + channel).to(tl.float32)
        b = tl.load(beta + t * b_t + h * b_h).to(tl.float32)
        to_v = tl.load(v + t * v_t + h * v_h + column).to(tl.float32)
        to_k *= tl.rsqrt(tl.sum(to_k * to_k, 0) + EPS)
        to_q *= tl.rsqrt(tl.sum(to_q * to_q, 0) + EPS) * scale
        g = lower_bound / (1.0 + tl.exp(-rate * (g + bias)))
        b = 1.0 / (1.0 + tl.exp(-b))
        S *= tl.exp(g)[:, None]
        u = b * (to_v - tl.sum(S * to_k[:, None], 0))
        out = tl.sum(S * to_q[:, None], 0) + tl.sum(to_k * to_q, 0) * u
        S += to_k[:, None] * u[None, :]
        tl.store(o + (t * H + h) * V + column, out.to(o.dtype.element_ty))
    tl.store(at, S.to(state.dtype.element_ty))
