"""KDA token by token: the definition that every other form must equal (report eq. 1; model.md 5.1, steps 3 to 6).

    S' = diag(exp g_t) S_{t-1}                    decay first
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T      erase and write on the decayed state
    o_t = S_t^T q_t                               read the updated state

Legend: T tokens, N sequences, H heads, K key and V value channels.
"""

import torch
from torch import Tensor

from openk3.ops.kda.gate import BoundedGate, activate

EPS = 1e-6  # added to the sum of squares, inside the root


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum of squares + 1e-6), over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def kda_reference(
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
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(o [T,H,V], None without q; final state [N,H,K,V]; states at the offsets [n,H,K,V]), differentiable."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    N, (_, H, K), V = len(bounds) - 1, k.shape, v.shape[-1]
    out_dtype = v.dtype
    k, v, g, beta = unit(k.to(dtype)), v.to(dtype), g.to(dtype), beta.to(dtype)
    q = None if q is None else unit(q.to(dtype)) * scale
    g, beta = activate(g, beta, gate)
    if initial_state is None:
        initial_state = v.new_zeros(N, H, K, V)
    outputs, final, at = [], [], {}
    for n in range(N):
        S_HKV = initial_state[n].to(dtype)
        for t in range(bounds[n], bounds[n + 1]):
            S_HKV = g[t].exp()[..., None] * S_HKV
            error_HV = v[t] - torch.einsum("hkv,hk->hv", S_HKV, k[t])
            S_HKV = S_HKV + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error_HV)
            if q is not None:
                outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q[t]))
            if t + 1 in offsets:
                at[t + 1] = S_HKV
        final.append(S_HKV)

    def stack(parts: list[Tensor], *shape: int) -> Tensor:
        return torch.stack(parts) if parts else v.new_zeros(0, *shape)

    states = stack([at[o] for o in offsets], H, K, V)
    o = None if q is None else stack(outputs, H, V).to(out_dtype)
    return o, stack(final, H, K, V), states
