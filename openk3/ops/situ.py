"""SiTU-GLU, the Sigmoid Tanh Unit, and the SwiGLU it replaced (report eq. 12, 18, 19; model.md section 8.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.dispatch import pick


def situ_glu(
    gate: Tensor, up: Tensor, beta1: float = 4.0, beta2: float = 25.0, *, backend: str = "auto"
) -> Tensor:
    """beta1 tanh(gate / beta1) sigma(gate) * beta2 tanh(up / beta2), both tanh and sigma of the raw gate.

    gate and up have one shape; computed in promote(dtype, float32), cast to gate.dtype once. |result| is at most
    beta1 * beta2, and the gradient never dies as a clamp's does. Raises ValueError if the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape")
    available = {"reference": _situ_reference, "fused": _SiTU.apply}
    return pick("situ_glu", backend, available, "fused")(gate, up, beta1, beta2)


def _situ_reference(gate: Tensor, up: Tensor, beta1: float, beta2: float) -> Tensor:
    g, u = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (gate, up))
    a = beta1 * torch.tanh(g / beta1) * torch.sigmoid(g)
    return (a * (beta2 * torch.tanh(u / beta2))).to(gate.dtype)


class _SiTU(torch.autograd.Function):
    """Keeps gate and up alone, in their own dtype, and computes the bounded branches again in the backward."""

    @staticmethod
    def forward(ctx, gate, up, beta1, beta2):
        ctx.save_for_backward(gate, up)
        ctx.betas = beta1, beta2
        return _situ_reference(gate, up, beta1, beta2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        gate, up = ctx.saved_tensors
        beta1, beta2 = ctx.betas
        g, u, d = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (gate, up, d_out))
        tanh_g, sigma, tanh_u = torch.tanh(g / beta1), torch.sigmoid(g), torch.tanh(u / beta2)
        d_a = (1 - tanh_g.square()) * sigma + beta1 * tanh_g * sigma * (1 - sigma)
        d_gate = d * d_a * (beta2 * tanh_u)
        d_up = d * (beta1 * tanh_g * sigma) * (1 - tanh_u.square())
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in promote(dtype, float32), cast to gate.dtype once: unbounded in both branches."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
