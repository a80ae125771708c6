"""Routed experts over one flat token axis (report eq. 11; model.md section 8.2, steps 4 and 5).

    e_j = w2_j f(w1_j z, w3_j z)        u = sum over the token's K experts of p_j e_j

Shapes: T tokens, K experts a token, E experts, L input and output width, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.dispatch import pick
from openk3.ops.situ import situ_glu

Activation = Callable[[Tensor, Tensor], Tensor]


def experts(
    z_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EIL: Tensor,
    w3_EIL: Tensor,
    w2_ELI: Tensor,
    *,
    activation: Activation = situ_glu,
    backend: str = "auto",
) -> Tensor:
    """Weighted sum of each token's experts: u [T, L] in z's dtype.

    w1 is the gate and w3 the up branch of `activation(gate, up)`. Each expert's output is rounded to z's dtype; the
    router weight is applied after w2, summed over K in promote(dtype, float32), cast once. ids are distinct within a
    token. Raises ValueError if shapes do not fit each other.
    """
    e, i, width = w1_EIL.shape
    if w3_EIL.shape != (e, i, width) or w2_ELI.shape != (e, width, i) or z_TL.shape[1:] != (width,):
        raise ValueError(
            f"z {tuple(z_TL.shape)}, w1 {tuple(w1_EIL.shape)}, w3 {tuple(w3_EIL.shape)}, w2 {tuple(w2_ELI.shape)} "
            "must be [T, L], [E, I, L], [E, I, L], [E, L, I]"
        )
    if ids_TK.shape != weights_TK.shape or len(ids_TK) != len(z_TL):
        raise ValueError(f"ids {tuple(ids_TK.shape)} and weights {tuple(weights_TK.shape)} must be [T, K]")
    return pick("experts", backend, {"reference": _reference}, "reference")(
        z_TL, ids_TK, weights_TK, w1_EIL, w3_EIL, w2_ELI, activation
    )


def _reference(
    z_TL: Tensor, ids_TK: Tensor, weights_TK: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, activation: Activation
) -> Tensor:
    wide = torch.promote_types(z_TL.dtype, torch.float32)
    u_TL = torch.zeros_like(z_TL, dtype=wide)
    for j in range(len(w1)):
        token, choice = (ids_TK == j).nonzero(as_tuple=True)
        z = z_TL[token]
        e_j = F.linear(activation(F.linear(z, w1[j]), F.linear(z, w3[j])), w2[j])
        u_TL = u_TL.index_add(0, token, weights_TK[token, choice, None].to(wide) * e_j.to(wide))
    return u_TL.to(z_TL.dtype)
