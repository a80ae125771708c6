"""The two scalars of the delta rule: how much of the state is kept (log decay) and how much is written (beta)."""

from typing import NamedTuple

import torch
from torch import Tensor


class BoundedGate(NamedTuple):
    """The lower-bounded decay of K3: g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias)), report eq. 2 and 5.

    A_log_H: log scale, one a head. dt_bias_HK: bias of the logit, added before the scale.
    lower_bound in [-5, 0): over 16 tokens the decay then spans less than e^80, so that a 16 x 16 tile of the
    chunk form is one ordinary matrix product (model.md 5.2).
    With a gate, `g` and `beta` of the KDA functions are raw logits.
    """

    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float = -5.0


def activate(g_THK: Tensor, beta_TH: Tensor, gate: BoundedGate | None) -> tuple[Tensor, Tensor]:
    """Log decay [T,H,K] and write strength [T,H]: from logits with a gate, as they are without one."""
    if gate is None:
        return g_THK, beta_TH
    scaled = gate.A_log_H.to(g_THK.dtype).exp()[:, None] * (g_THK + gate.dt_bias_HK.to(g_THK.dtype))
    return gate.lower_bound * torch.sigmoid(scaled), torch.sigmoid(beta_TH)
