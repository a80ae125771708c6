"""Balancing the router by a bias that only selects (report section 2.3.3, eq. 14; training.md section 4).

Quantile Balancing in its histogram form (report appendix D): every micro-batch adds the required biases
`cutoff - score` of its tokens to an integer table, no communication; once a step the tables of all layers and ranks
are summed in one all-reduce, and every rank solves the same thing. The new bias acts from the next step on. There is
no auxiliary loss, and an evaluation leaves everything as it is: routers show their routing in training mode alone.

Letters: L MoE layers, E experts, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openk3.model.moe import Router
from openk3.ops.routing import Routing, histogram, histogram_bias, loads, max_violation, sign_step
from openk3.train.recipe import BalanceRecipe


@dataclass(frozen=True)
class Loads:
    """How evenly one step used the experts, a value for each MoE layer, beside the target load."""

    max_violation: list[float]  # largest load / mean load - 1
    dead: list[int]  # experts without a token
    q: float  # tokens of the step * k / experts; sampling noise alone makes max_violation about 3 / sqrt(q)


class Balancer:
    """Watches the routers of a model and moves their biases after each step.

    Raises ValueError for an unknown rule.
    """

    def __init__(self, model: nn.Module, balance: BalanceRecipe, group: dist.ProcessGroup | None = None):
        if balance.rule not in ("quantile", "sign", "none"):
            raise ValueError(f"balancing rule {balance.rule!r} is not one of quantile, sign, none")
        self.balance, self.group = balance, group
        self.routers = [m for m in model.modules() if isinstance(m, Router)]
        for layer, router in enumerate(self.routers):
            router.observer = partial(self.observe, layer)
        if self.routers:
            bias_E = self.bias(self.routers[0])
            experts = len(bias_E)
            columns = experts * (1 + balance.bins * (balance.rule == "quantile"))
            self.table_LX = torch.zeros(len(self.routers), columns, dtype=torch.int32, device=bias_E.device)
            self.loads_LE = self.table_LX[:, :experts]  # one tensor, so that one collective moves all of it
            self.counts_LEB = self.table_LX[:, experts:].unflatten(1, (experts, -1))

    @staticmethod
    def bias(router: Router) -> Tensor:
        return router.get_buffer("e_score_correction_bias")

    @torch.no_grad()
    def observe(self, layer: int, routing: Routing) -> None:
        """Add one micro-batch: loads, and under the quantile rule the histogram of required biases."""
        loads_E = self.loads_LE[layer]
        loads_E += loads(routing.ids_TK, len(loads_E))
        if self.balance.rule == "quantile":
            bias_E = self.bias(self.routers[layer])
            self.counts_LEB[layer] += histogram(routing.scores_TE, routing.cutoff_T, bias_E, self.balance.bins)

    @torch.no_grad()
    def step(self) -> Loads:
        """Close a step: sum over ranks, move every bias in place, forget the counts."""
        if not self.routers:
            return Loads([], [], 0.0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.table_LX, group=self.group)
        for layer, router in enumerate(self.routers):
            self.bias(router).copy_(self.solve(layer, router))
        loads_LE = self.loads_LE.to("cpu", copy=True)  # the table is emptied below
        self.table_LX.zero_()
        return Loads(
            [max_violation(loads_E) for loads_E in loads_LE],
            (loads_LE == 0).sum(1).tolist(),
            float(loads_LE[0].sum()) / loads_LE.shape[1],
        )

    def solve(self, layer: int, router: Router) -> Tensor:
        """The bias of the next step."""
        bias_E = self.bias(router)
        if self.balance.rule == "quantile":
            return histogram_bias(self.counts_LEB[layer], bias_E, router.k)
        if self.balance.rule == "sign":
            return sign_step(bias_E, self.loads_LE[layer], self.balance.rate)
        return bias_E
