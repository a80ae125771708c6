"""One token, or a few to verify, for each of many sequences whose states live in slots of a pool.

Legend: T = N M tokens (M a slot), N slots, S slots of the pool, H heads, K key and V value channels.
"""

import torch
from torch import Tensor

from openk3.ops.kda.gate import BoundedGate, activate
from openk3.ops.kda.reference import kda_reference, unit


def step_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state_SHKV: Tensor,
    slots: Tensor,
    gate: BoundedGate | None,
    scale: float,
) -> Tensor:
    """o [N M, H, V]; `slots` [N] holds distinct numbers; their states advance in place.

    The output is read from the decayed state and corrected, o = S'^T q + (k . q) u, so that the state is read once
    (model.md 5.1, step 6).
    """
    N, dtype = len(slots), torch.promote_types(k.dtype, torch.float32)
    (T, H, K), V = k.shape, v.shape[-1]
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    q, k = unit(q) * scale, unit(k)
    g, beta = activate(g, beta, gate)
    S = state_SHKV.index_select(0, slots).to(dtype)
    alpha = g.exp().view(N, -1, H, K, 1)
    keys_queries = torch.stack((k, q), dim=2).view(N, -1, H, 2, K)
    k_dot_q = (beta[..., None] * (k * q).sum(-1, keepdim=True)).view(N, -1, H, 1)
    k, v, beta = k.view(N, -1, H, K, 1), v.view(N, -1, H, V), beta.view(N, -1, H, 1)
    o = v.new_empty(N, T // N, H, V)
    for m in range(T // N):
        S *= alpha[:, m]
        held, read = torch.matmul(keys_queries[:, m], S).unbind(2)
        error = v[:, m] - held
        S.addcmul_(k[:, m], (beta[:, m] * error)[:, :, None])
        torch.addcmul(read, k_dot_q[:, m], error, out=o[:, m])
    state_SHKV.index_copy_(0, slots, S.to(state_SHKV.dtype))
    return o.view(T, H, V)


def step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state_SHKV: Tensor,
    slots: Tensor,
    gate: BoundedGate | None,
    scale: float,
) -> Tensor:
    """The same by the definition."""
    each = len(k) // len(slots)
    o, final, _ = kda_reference(
        q,
        k,
        v,
        g,
        beta,
        bounds=tuple(range(0, len(k) + 1, each)),
        offsets=(),
        gate=gate,
        scale=scale,
        initial_state=state_SHKV.index_select(0, slots),
    )
    assert o is not None  # q was given
    state_SHKV.index_copy_(0, slots, final.to(state_SHKV.dtype))
    return o
