"""From the inputs of the op to what the chunk form works on, and the way back for gradients.

Tokens go to their place in the chunks; q and k are normalised, the decay logits pass through the gate, beta through
its sigmoid (kernels.md 3.2 and, for the gradients, 6.3).

Legend: T tokens, H heads, B = chunks times heads, C tokens of a chunk, K or V channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.kda.layout import Layout

EPS = 1e-6  # added to the sum of squares, inside the root


class Prologue(NamedTuple):
    """q_BCK and k_BCK of unit length (q None if no output is wanted), v_BCV, log decay g_BCK, beta_BC1, and the
    inverse norms of q and k, [B, C, 1]."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    q_inverse_norm: Tensor | None
    k_inverse_norm: Tensor


def lowest_decay(dtype: torch.dtype) -> float:
    """A log decay whose exponential is zero; what lies below it is raised to it, so that sums stay moderate."""
    return -750.0 if dtype == torch.float64 else -110.0


def unit(x_BCK: Tensor) -> tuple[Tensor, Tensor]:
    """Scales each row to length one, in place; returns it with its inverse norm."""
    inverse = (x_BCK * x_BCK).sum(-1, keepdim=True).add_(EPS).rsqrt_()
    return x_BCK.mul_(inverse), inverse


def unit_backward(dy_BCK: Tensor, y_BCK: Tensor, inverse_norm: Tensor) -> Tensor:
    """Gradient of x given that of y = x / |x|; overwrites dy."""
    along = (dy_BCK * y_BCK).sum(-1, keepdim=True)
    return dy_BCK.addcmul_(y_BCK, along, value=-1).mul_(inverse_norm)


def prologue(
    layout: Layout,
    dtype: torch.dtype,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
) -> Prologue:
    """Everything in chunks, in `dtype`. Padding has k = v = q = 0, beta = 0 and g = 0."""

    def place(x: Tensor) -> Tensor:
        return layout.gather(x).to(dtype)

    q_BCK, q_inverse = (None, None) if q is None else unit(place(q))
    k_BCK, k_inverse = unit(place(k))
    g_BCK, beta_BC1 = place(g), place(beta[..., None])
    if A_log is None:
        g_BCK = g_BCK.clamp_(min=lowest_decay(dtype))
    else:
        assert dt_bias is not None  # a gate has both
        by_head = g_BCK.view(-1, layout.heads, layout.chunk, g_BCK.shape[-1])
        rate = A_log.to(dtype).exp()[:, None, None]
        by_head.add_(dt_bias.to(dtype)[:, None]).mul_(rate).sigmoid_().mul_(lower_bound)
        beta_BC1.sigmoid_()
        if layout.padding.numel():
            g_BCK.view(-1, g_BCK.shape[-1]).index_fill_(0, layout.padding, 0)
            beta_BC1.view(-1).index_fill_(0, layout.padding, 0)
    return Prologue(q_BCK, k_BCK, place(v), g_BCK, beta_BC1, q_inverse, k_inverse)


def gate_backward(
    layout: Layout,
    dg_BCK: Tensor,
    g_BCK: Tensor,
    dbeta_BC1: Tensor,
    beta_BC1: Tensor,
    z_THK: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
) -> tuple[Tensor, ...]:
    """Gradients of the logits z [T,H,K] and of beta [T,H], of A_log and dt_bias; overwrites dg and dbeta.

    With s = g / lower_bound: dz = dg exp(A_log) g (1 - s), ddt_bias = sum dz, dA_log = sum dz (z + dt_bias).
    """
    H, K = dt_bias.shape
    dz = dg_BCK.mul_(torch.addcmul(g_BCK, g_BCK, g_BCK, value=-1 / lower_bound))
    dz.view(-1, H, layout.chunk, K).mul_(A_log.to(dz.dtype).exp()[:, None, None])
    dz_THK = layout.scatter(dz)
    d_dt_bias = dz_THK.sum(0)
    d_A_log = (dz_THK * z_THK).sum((0, 2)) + (d_dt_bias * dt_bias).sum(1)
    dbeta = dbeta_BC1.mul_(torch.addcmul(beta_BC1, beta_BC1, beta_BC1, value=-1))
    return dz_THK, layout.scatter(dbeta)[..., 0], d_A_log, d_dt_bias
