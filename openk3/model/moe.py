"""Stable LatentMoE (report eq. 11; model.md section 8.2).

    y = W_up RMSNorm( sum_j p_j E_j(W_down x) ) + shared(x)

The router looks at the full-width x; the experts live in a latent space half as wide. Training balances the router
by a bias that only selects (train/balance.py); nothing here adds a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.linear import Linear, RMSNorm
from openk3.model.mlp import MLP, activation
from openk3.ops.experts import experts
from openk3.ops.routing import Routing, route


class Router(nn.Module):
    """Sigmoid scores of all experts in float32, top-k of score + bias, weights from the scores alone (eq. 13)."""

    e_score_correction_bias: Tensor

    def __init__(self, config: K3Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.empty(config.num_experts, dtype=torch.float32))
        self.k = config.num_experts_per_token
        self.std = config.initializer_range
        self.observer: Callable[[Routing], None] | None = None  # sees each training batch once

    def reset(self, generator: torch.Generator) -> None:
        self.weight.data.normal_(0.0, self.std, generator=generator)
        self.e_score_correction_bias.zero_()

    def forward(self, x_TD: Tensor) -> Routing:
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        routing = route(F.linear(x_TD.to(dtype), self.weight.to(dtype)), self.e_score_correction_bias, self.k)
        if self.observer is not None and self.training:
            self.observer(routing)
        return routing


class ExpertStack(nn.Module):
    """All routed experts: w1 (gate), w3 (up) [E, I, L] and w2 (down) [E, L, I]."""

    def __init__(self, config: K3Config):
        super().__init__()
        e, i, width = config.num_experts, config.moe_intermediate_size, config.expert_width
        self.w1 = nn.Parameter(torch.empty(e, i, width))
        self.w2 = nn.Parameter(torch.empty(e, width, i))
        self.w3 = nn.Parameter(torch.empty(e, i, width))
        self.act = activation(config)
        self.std = config.initializer_range
        self.op = experts

    def reset(self, generator: torch.Generator) -> None:
        for weight in (self.w1, self.w2, self.w3):
            weight.data.normal_(0.0, self.std, generator=generator)

    def forward(self, z_TL: Tensor, routing: Routing) -> Tensor:
        w1, w3, w2 = (w.to(z_TL.dtype) for w in (self.w1, self.w3, self.w2))
        return self.op(z_TL, routing.ids_TK, routing.weights_TK, w1, w3, w2, activation=self.act)


class MoE(nn.Module):
    """Routed and shared experts at full width: what LatentMoE replaced."""

    def __init__(self, config: K3Config):
        super().__init__()
        self.gate = Router(config)
        self.experts = ExpertStack(config)
        self.shared_experts = MLP(config, config.num_shared_experts * config.moe_intermediate_size)

    def routed(self, x_TD: Tensor) -> Tensor:
        return self.experts(x_TD, self.gate(x_TD))

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.routed(x_TD) + self.shared_experts(x_TD)


class LatentMoE(MoE):
    """Routed experts in the latent space; the norm stands after the weighted sum, before the way up."""

    def __init__(self, config: K3Config):
        super().__init__(config)
        d, latent, std = config.hidden_size, config.routed_expert_hidden_size, config.initializer_range
        self.routed_expert_down_proj = Linear(d, latent, std)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps) if config.latent_norm else nn.Identity()
        self.routed_expert_up_proj = Linear(latent, d, std)

    def routed(self, x_TD: Tensor) -> Tensor:
        u_TL = self.experts(self.routed_expert_down_proj(x_TD), self.gate(x_TD))
        return self.routed_expert_up_proj(self.routed_expert_norm(u_TL))


MOE = {True: LatentMoE, False: MoE}  # by config.latent_moe
