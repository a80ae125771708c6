"""Routed experts over one flat token axis (report eq. 11; model.md section 8.2, steps 4 and 5).

    e_j = w2_j f(w1_j z, w3_j z)        u = sum over the token's K experts of p_j e_j

Shapes: T tokens, K experts a token, E experts, L input and output width, I inner width, O an output width,
R = T K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    router weight is applied after w2, summed over K in promote(dtype, float32), cast once. Raises ValueError if
    shapes do not fit each other.
    """
    e, i, width = w1_EIL.shape
    if w3_EIL.shape != (e, i, width) or w2_ELI.shape != (e, width, i) or z_TL.shape[1:] != (width,):
        raise ValueError(
            f"z {tuple(z_TL.shape)}, w1 {tuple(w1_EIL.shape)}, w3 {tuple(w3_EIL.shape)}, w2 {tuple(w2_ELI.shape)} "
            "must be [T, L], [E, I, L], [E, I, L], [E, L, I]"
        )
    if ids_TK.shape != weights_TK.shape or len(ids_TK) != len(z_TL):
        raise ValueError(
            f"ids {tuple(ids_TK.shape)} and weights {tuple(weights_TK.shape)} must both be [{len(z_TL)}, K]"
        )
    available = {"reference": _reference, "grouped": _grouped}
    return pick("experts", backend, available, "grouped")(z_TL, ids_TK, weights_TK, w1_EIL, w3_EIL, w2_ELI, activation)


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


class Order(NamedTuple):
    """Where the T K (token, choice) pairs stand once they are sorted by expert."""

    token_R: Tensor  # token of each sorted row
    pair_R: Tensor  # position of each sorted row in the flat [T, K]
    row_TK: Tensor  # sorted row of each pair: the inverse
    ends_E: Tensor  # int32, one past the last row of each expert


def sort_by_expert(ids_TK: Tensor, n_experts: int) -> Order:
    """Stable order of the pairs by expert, without waiting for the device."""
    flat = ids_TK.reshape(-1)
    pair_R = flat.argsort(stable=True)
    row = torch.empty_like(pair_R)
    row[pair_R] = torch.arange(len(flat), device=flat.device)
    counts_E = torch.zeros(n_experts, dtype=torch.int32, device=flat.device)
    counts_E.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    token_R = pair_R // ids_TK.shape[1]
    return Order(token_R, pair_R, row.view_as(ids_TK), counts_E.cumsum(0, dtype=torch.int32))


def _grouped(
    z_TL: Tensor, ids_TK: Tensor, weights_TK: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, activation: Activation
) -> Tensor:
    order = sort_by_expert(ids_TK, len(w1))
    gate_RI, up_RI = _GateUp.apply(z_TL, w1, w3, *order)
    return _DownCombine.apply(activation(gate_RI, up_RI), weights_TK, w2, z_TL.dtype, *order)


def _spans(ends_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, one past its last row) of the experts that have rows."""
    ends = ends_E.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if b > a]


def _on_gpu(x: Tensor) -> bool:
    """Whether PyTorch's grouped kernel takes these operands: it needs no row counts on the host."""
    return x.is_cuda and x.dtype == torch.bfloat16


def grouped_linear(x_RI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """x w_e^T for the rows of each expert e: [R, O]."""
    if _on_gpu(x_RI):
        return F.grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=ends_E)
    out_RO = x_RI.new_empty(len(x_RI), w_EOI.shape[1])
    for e, a, b in _spans(ends_E):
        torch.mm(x_RI[a:b], w_EOI[e].t(), out=out_RO[a:b])
    return out_RO


def grouped_linear_input_grad(pairs: list[tuple[Tensor, Tensor]], ends_E: Tensor) -> Tensor:
    """Sum over the pairs (dy [R, O], w [E, O, I]) of dy w_e: [R, I]."""
    dy_RO, w_EOI = pairs[0]
    if _on_gpu(dy_RO):
        terms = [F.grouped_mm(dy, w, offs=ends_E) for dy, w in pairs]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
    dx_RI = dy_RO.new_empty(len(dy_RO), w_EOI.shape[2])
    for e, a, b in _spans(ends_E):
        dx = torch.mm(dy_RO[a:b], w_EOI[e], out=dx_RI[a:b])
        for dy, w in pairs[1:]:
            dx.addmm_(dy[a:b], w[e])
    return dx_RI


def grouped_linear_weight_grad(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """dy^T x over the rows of each expert: [E, O, I], zero for an expert without rows."""
    if _on_gpu(dy_RO):
        return F.grouped_mm(dy_RO.t(), x_RI, offs=ends_E)
    dw_EOI = dy_RO.new_zeros(len(ends_E), dy_RO.shape[1], x_RI.shape[1])
    for e, a, b in _spans(ends_E):
        torch.mm(dy_RO[a:b].t(), x_RI[a:b], out=dw_EOI[e])
    return dw_EOI


class _GateUp(torch.autograd.Function):
    """Both branches of each token's experts, from the tokens' own rows: nothing of size R is kept."""

    @staticmethod
    def forward(ctx, z_TL, w1, w3, *order):
        order = Order(*order)
        ctx.save_for_backward(z_TL, w1, w3, *order)
        z_RL = z_TL.index_select(0, order.token_R)
        return grouped_linear(z_RL, w1, order.ends_E), grouped_linear(z_RL, w3, order.ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_gate_RI, d_up_RI):
        z_TL, w1, w3, *order = ctx.saved_tensors
        order = Order(*order)
        d_gate_RI, d_up_RI = d_gate_RI.contiguous(), d_up_RI.contiguous()
        z_RL = z_TL.index_select(0, order.token_R)
        d_w1 = grouped_linear_weight_grad(d_gate_RI, z_RL, order.ends_E)
        d_w3 = grouped_linear_weight_grad(d_up_RI, z_RL, order.ends_E)
        dz_RL = grouped_linear_input_grad([(d_gate_RI, w1), (d_up_RI, w3)], order.ends_E)
        return _sum_choices(dz_RL, order, None).to(z_TL.dtype), d_w1, d_w3, None, None, None, None


def _sum_choices(y_RL: Tensor, order: Order, weights_TK: Tensor | None) -> Tensor:
    """Each token's rows summed, weighted if asked: [T, L] in promote(dtype, float32)."""
    wide = torch.promote_types(y_RL.dtype, torch.float32)
    choices = (y_RL.index_select(0, row_T).to(wide) for row_T in order.row_TK.unbind(1))
    total_TL = next(choices)
    if weights_TK is None:
        for y_TL in choices:
            total_TL.add_(y_TL)
        return total_TL
    first_T1, *p_T1 = weights_TK.to(wide).unsqueeze(-1).unbind(1)
    total_TL.mul_(first_T1)
    for y_TL, p in zip(choices, p_T1, strict=True):
        total_TL.addcmul_(y_TL, p)
    return total_TL


class _DownCombine(torch.autograd.Function):
    """w2 and the weighted sum. The expert outputs e are not kept for the gradient of the router weights:
    dp = <du, w2 a> = <w2^T du, a>, and w2^T du is needed anyway."""

    @staticmethod
    def forward(ctx, a_RI, weights_TK, w2, dtype, *order):
        order = Order(*order)
        ctx.save_for_backward(a_RI, weights_TK, w2, *order)
        e_RL = grouped_linear(a_RI, w2, order.ends_E)
        return _sum_choices(e_RL, order, weights_TK).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, du_TL):
        a_RI, weights_TK, w2, *order = ctx.saved_tensors
        order = Order(*order)
        wide = torch.promote_types(a_RI.dtype, torch.float32)
        p_R1 = weights_TK.reshape(-1, 1).index_select(0, order.pair_R).to(wide)
        du_RL = du_TL.to(a_RI.dtype).index_select(0, order.token_R)
        pull_RI = grouped_linear_input_grad([(du_RL, w2)], order.ends_E).to(wide)
        dp_R = torch.linalg.vecdot(pull_RI, a_RI.to(wide))
        d_w2 = grouped_linear_weight_grad((du_RL.to(wide) * p_R1).to(a_RI.dtype), a_RI, order.ends_E)
        d_weights = dp_R[order.row_TK].to(weights_TK.dtype)
        return (pull_RI.mul_(p_R1)).to(a_RI.dtype), d_weights, d_w2, None, None, None, None, None
