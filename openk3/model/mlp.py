"""The gated MLP: dense FFN of the first layer, and the shared experts (model.md section 8.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.linear import Linear
from openk3.ops.situ import situ_glu, swiglu


def activation(config: K3Config) -> Callable[[Tensor, Tensor], Tensor]:
    """The gated activation f(gate, up) that `config.activation` names."""
    situ = partial(situ_glu, beta1=config.activation_situ_beta, beta2=config.activation_situ_linear_beta)
    return {"situ": situ, "swiglu": swiglu}[config.activation]


class MLP(nn.Module):
    """down(f(gate x, up x)), width `inner`."""

    def __init__(self, config: K3Config, inner: int):
        super().__init__()
        d, std = config.hidden_size, config.initializer_range
        self.gate_proj = Linear(d, inner, std)
        self.up_proj = Linear(d, inner, std)
        self.down_proj = Linear(inner, d, std)
        self.act = activation(config)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x_TD), self.up_proj(x_TD)))
