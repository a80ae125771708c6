"""SiTU-GLU, the Sigmoid Tanh Unit, and the SwiGLU it replaced (report eq. 12, 18, 19; model.md section 8.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.dispatch import pick


def situ_glu(gate: Tensor, up: Tensor, beta1: float = 4.0, beta2: float = 25.0, *, backend: str = "auto") -> Tensor:
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


def _branches(gate: Tensor, up: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(gate / beta1), sigma(gate), tanh(up / beta2) in promote(dtype, float32)."""
    g, u = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (gate, up))
    return _tanh(g, 2 / beta1), torch.sigmoid(g), _tanh(u, 2 / beta2)


def _tanh(x: Tensor, factor: float) -> Tensor:
    """tanh(x factor / 2) as e / (e + 2), e = expm1(x factor): as accurate, and cheaper on a CPU than its tanh.
    Beyond 40 the result is 1 in float64 too, and e would overflow."""
    e = (x * factor).clamp_(max=40.0).expm1_()
    return e.div_(e + 2)


class _SiTU(torch.autograd.Function):
    """In float32 keeps the three bounded factors, of which the backward is made without another transcendental; in a
    narrower dtype keeps gate and up alone and computes the factors again."""

    @staticmethod
    def forward(ctx, gate, up, beta1, beta2):
        factors = _branches(gate, up, beta1, beta2)
        wide = factors[0].dtype
        ctx.save_for_backward(*(factors if gate.dtype == wide else (gate, up)))
        ctx.betas = beta1, beta2
        tanh_g, sigma, tanh_u = factors
        return (tanh_g * sigma).mul_(tanh_u).mul_(beta1 * beta2).to(gate.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        beta1, beta2 = ctx.betas
        factors = ctx.saved_tensors
        if len(factors) == 2:
            gate, up = factors
            factors = _branches(gate, up, beta1, beta2)
        tanh_g, sigma, tanh_u = factors
        d_sigma = d_out.to(sigma.dtype) * sigma
        d_gate = (1 - tanh_g.square()).addcmul_(tanh_g, 1 - sigma, value=beta1)
        d_gate.mul_(tanh_u).mul_(d_sigma).mul_(beta2)
        d_up = tanh_u.square().neg_().add_(1).mul_(tanh_g).mul_(d_sigma).mul_(beta1)
        return d_gate.to(d_out.dtype), d_up.to(d_out.dtype), None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in promote(dtype, float32), cast to gate.dtype once: unbounded in both branches."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
