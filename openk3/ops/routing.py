"""The sigmoid router and the rules that balance it (report eq. 13, 14, appendices C and D; model.md sections 8.2, 9).

Shapes: T tokens, E experts, K experts a token. A bias [E] is added to the scores to select, and never enters weights
or gradients. Quantile Balancing sets it so that each expert's target load q = T K / E of tokens clears its cutoff.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

HISTOGRAM_BINS = 1000


class Routing(NamedTuple):
    """One batch's routing. ids [T, K] int64 by falling biased score; weights [T, K]; scores [T, E] before the bias."""

    ids_TK: Tensor
    weights_TK: Tensor
    cutoff_T: Tensor  # the (K + 1)-th largest biased score
    scores_TE: Tensor


def route(logits_TE: Tensor, bias_E: Tensor, k: int) -> Routing:
    """Top-k of sigma(logits) + bias, ties to the lower expert; weights s / (sum of the selected s + 1e-20) (eq. 13).

    All in promote(dtype, float32). Weights carry a gradient to the logits; selection and cutoff do not, and nothing
    does to the bias. Raises ValueError unless 1 <= k < E: the cutoff is the (k + 1)-th score.
    """
    n_experts = logits_TE.shape[-1]
    if not 1 <= k < n_experts:
        raise ValueError(f"k = {k} must be at least 1 and below the number of experts, {n_experts}")
    if bias_E.shape != (n_experts,):
        raise ValueError(f"bias has shape {tuple(bias_E.shape)}, expected ({n_experts},)")
    scores_TE = torch.sigmoid(logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)))
    with torch.no_grad():
        best, ids = top_lowest_first(scores_TE + bias_E, k + 1)
    ids_TK = ids[:, :k]
    selected_TK = scores_TE.gather(1, ids_TK)
    weights_TK = selected_TK / (selected_TK.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids_TK, weights_TK, best[:, k], scores_TE)


def top_lowest_first(values_TE: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row and their indices, by falling value; equal values by rising index.

    topk leaves the order of equal values open. float32 values therefore become 64-bit keys, the value's bits above
    the falling index: no two are equal, and topk costs a third of the stable sort that float64 takes.
    """
    n_values = values_TE.shape[-1]
    if values_TE.dtype != torch.float32:
        values, ids = values_TE.sort(dim=-1, descending=True, stable=True)
        return values[..., :n], ids[..., :n]
    bits = (values_TE + 0.0).view(torch.int32)  # adding 0 makes -0 equal to 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    falling = torch.arange(n_values - 1, -1, -1, device=bits.device)
    ids = n_values - 1 - ((ordered.long() << 32) + falling).topk(n, dim=-1).values.bitwise_and_(0xFFFFFFFF)
    return values_TE.gather(-1, ids), ids


def loads(ids_TK: Tensor, n_experts: int) -> Tensor:
    """Tokens sent to each expert, int64 [E]."""
    flat = ids_TK.reshape(-1)
    return torch.zeros(n_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def max_violation(loads_E: Tensor) -> float:
    """Largest load over the mean load, less 1: 0 is perfect balance. 0 if there are no tokens."""
    total = int(loads_E.sum())
    return int(loads_E.max()) * len(loads_E) / total - 1 if total else 0.0


def required_quantile(scores_TE: Tensor, cutoff_T: Tensor, k: int) -> Tensor:
    """The (q + 1)-th smallest required bias cutoff - score of each expert, q = T k / E: [E] in the scores' dtype.

    With it exactly q tokens of each expert clear their cutoff (eq. 14: minus the (q + 1)-th largest of score -
    cutoff). An order statistic: an interpolating quantile is another number. If T k / E is no whole number its floor
    is taken, which is the minimiser of the dual. Raises ValueError without a token.
    """
    n_tokens, n_experts = scores_TE.shape
    if not n_tokens:
        raise ValueError("the quantile of 0 tokens does not exist; expected scores [T, E] with T >= 1")
    required_ET = (cutoff_T[:, None] - scores_TE).detach().t().contiguous()
    return required_ET.kthvalue(n_tokens * k // n_experts + 1, dim=-1).values


def quantile_bias(scores_TE: Tensor, cutoff_T: Tensor, k: int) -> Tensor:
    """The exact rule: `required_quantile`, centred. The bias of the *next* batch; centring changes no selection."""
    bias_E = required_quantile(scores_TE, cutoff_T, k)
    return bias_E - bias_E.mean()


def _histogram_range(bias_E: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Lower end and bin width of [min b - 1, max b + 1], which holds every required bias (report appendix D)."""
    low, high = bias_E.min() - 1, bias_E.max() + 1
    return low, (high - low) / bins


def histogram(scores_TE: Tensor, cutoff_T: Tensor, bias_E: Tensor, bins: int = HISTOGRAM_BINS) -> Tensor:
    """Required biases cutoff - score of each expert, counted in uniform bins: int32 [E, bins].

    `bias_E` is the bias the batch was routed with. Counts of micro-batches and of ranks add up: one integer sum gives
    what the whole step would have given.
    """
    n_experts = scores_TE.shape[1]
    low, width = _histogram_range(bias_E, bins)
    required_TE = cutoff_T[:, None] - scores_TE.detach()
    bin_TE = required_TE.sub_(low).div_(width).int().clamp_(0, bins - 1)
    first_bin_E = torch.arange(0, n_experts * bins, bins, dtype=torch.int32, device=bin_TE.device)
    flat = bin_TE.add_(first_bin_E).view(-1).long()
    counts = torch.zeros(n_experts * bins, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts.view(n_experts, bins)


def histogram_quantile(counts_EB: Tensor, bias_E: Tensor, k: int) -> Tensor:
    """The ceil(q)-th smallest required bias of each expert to within a bin, interpolated inside it: float64 [E].

    `counts_EB` are those of a whole step, `bias_E` the bias it was routed with (report appendix D).
    """
    n_experts, bins = counts_EB.shape
    low, width = (t.double() for t in _histogram_range(bias_E, bins))
    cumulative_EB = counts_EB.long().cumsum(-1)
    target = cumulative_EB[0, -1] * k  # q E, a whole number
    rank = (target + n_experts - 1) // n_experts
    bin_E1 = (cumulative_EB < rank).sum(-1, keepdim=True).clamp(max=bins - 1)
    inside_E1 = counts_EB.gather(1, bin_E1)
    before_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
    fraction_E1 = ((target.double() / n_experts - before_E1) / inside_E1.clamp(min=1).double()).clamp(0, 1)
    return (low + (bin_E1 + fraction_E1) * width).squeeze(1)


def histogram_bias(counts_EB: Tensor, bias_E: Tensor, k: int) -> Tensor:
    """The rule as it runs: `histogram_quantile`, centred, in the bias's dtype; without any token, bias_E as it is."""
    new_E = histogram_quantile(counts_EB, bias_E, k)
    return torch.where(counts_EB[0].sum() > 0, (new_E - new_E.mean()).to(bias_E.dtype), bias_E)


def sign_step(bias_E: Tensor, loads_E: Tensor, rate: float = 1e-3) -> Tensor:
    """The rule before Quantile Balancing: bias + rate * sign(mean load - load), SignSGD on the same dual."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"rate = {rate} must be positive and finite")
    loads = loads_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(loads.mean() - loads)
