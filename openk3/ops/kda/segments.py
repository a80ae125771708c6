"""A run of tokens as one affine map of the state: S -> M S + S0 (report eq. 17; model.md 5.3, kernels.md 5.1).

M is the ordered product of (I - beta k k^T) diag(alpha), newest factor on the left; S0 is the state that grows from
zero. Such maps compose exactly, so a sequence can be cut over devices: every piece computes its map, the maps are
exchanged, and each piece folds the maps before it into its true initial state.

Legend: T tokens, N segments, H heads, K key and V value channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AffineMap = tuple[Tensor, Tensor]


def segment(run: Callable[..., tuple], v: Tensor, n_segments: int, K: int) -> AffineMap:
    """(M [N,H,K,K], S [N,H,K,V]); `run(v, initial_state)` is a recurrence without its outputs.

    One pass over two sets of columns: v from the zero state gives S; no values from the unit state give M.
    """
    T, H, V = v.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    identity = torch.eye(K, dtype=dtype, device=v.device)
    initial_state = torch.cat([identity.new_zeros(K, V), identity], dim=1).expand(n_segments, H, K, V + K)
    _, final, _ = run(torch.cat([v, v.new_zeros(T, H, K)], dim=-1), initial_state)
    return final[..., V:], final[..., :V]


def compose(later: AffineMap, earlier: AffineMap) -> AffineMap:
    """The map of `earlier` followed by `later`: (M2 M1, M2 S1 + S2). Associative, not commutative."""
    (M2, S2), (M1, S1) = later, earlier
    return M2 @ M1, M2 @ S1 + S2
