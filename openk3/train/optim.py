"""The one optimizer: Muon for matrices, AdamW for the rest, at one learning rate (training.md section 2).

Parameters are the float32 masters; the model casts them to the compute dtype where it uses them. Momentum and second
moments are float32 too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.train.muon import buckets
from openk3.train.parameters import plan
from openk3.train.recipe import OptimRecipe

aten = torch.ops.aten  # many tensors in one call
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


class AdamW:
    """Adam with decoupled decay over a list of named parameters; those without a gradient are left alone."""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, Tensor], weight_decay: float):
        self.names, self.weight_decay = names, weight_decay
        self.weights = [parameters[name] for name in names]
        self.mean = [torch.zeros_like(w) for w in self.weights]
        self.square = [torch.zeros_like(w) for w in self.weights]

    def step(self, lr: float, count: int) -> dict[str, Tensor]:
        """Update number `count` (from 1), in place. Returns what was subtracted over lr, by name."""
        live = [i for i, w in enumerate(self.weights) if w.grad is not None]
        if not live:
            return {}
        weights = [self.weights[i].detach() for i in live]
        grads = [self.weights[i].grad for i in live]
        mean, square = [self.mean[i] for i in live], [self.square[i] for i in live]
        aten._foreach_lerp_(mean, grads, 1 - BETA1)
        aten._foreach_mul_(square, BETA2)
        aten._foreach_addcmul_(square, grads, grads, 1 - BETA2)
        denominator = aten._foreach_sqrt(square)
        aten._foreach_div_(denominator, (1 - BETA2**count) ** 0.5)
        aten._foreach_add_(denominator, EPS)
        updates = aten._foreach_div.List(mean, denominator)  # the bare name prints its arguments before it resolves
        aten._foreach_div_(updates, 1 - BETA1**count)
        aten._foreach_mul_(weights, 1 - lr * self.weight_decay)
        aten._foreach_add_(weights, updates, alpha=-lr)
        return {self.names[i]: update for i, update in zip(live, updates, strict=True)}


class Optimizer:
    """Updates a model's parameters in place from their gradients.

    Raises ValueError for a parameter that is not float32 or float64, or that no rule of `parameters.py` sorts.
    """

    def __init__(self, model: nn.Module, config: K3Config, optim: OptimRecipe):
        parameters = dict(model.named_parameters())
        for name, tensor in parameters.items():
            if tensor.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"parameter {name} is {tensor.dtype}; masters are float32 or float64")
        self.plan = plan(parameters.items(), config, optim.optimizer)
        self.parameters = parameters
        self.count = torch.zeros((), dtype=torch.int64)
        self.buckets = buckets(self.plan.muon, parameters, optim.weight_decay)
        self.adamw = [
            AdamW(self.plan.adamw, parameters, optim.weight_decay),
            AdamW(self.plan.adamw_undecayed, parameters, 0.0),
        ]

    @torch.no_grad()
    def step(self, lr: float, *, measure: bool = False) -> dict[str, Tensor]:
        """One update at rate `lr`. With `measure`, the Frobenius norm of the update over lr, by matrix with heads on
        its rows: [heads]; else an empty dict."""
        self.count += 1
        squares: dict[str, Tensor] = {}
        for bucket in self.buckets:
            for part, update in zip(bucket.parts, bucket.step(lr), strict=True):
                if measure and part.name in self.plan.heads:
                    square_H = self.head_squares(part.name, update)
                    squares[part.name] = squares.get(part.name, 0) + square_H
        for group in self.adamw:
            for name, update in group.step(lr, int(self.count)).items():
                if measure and name in self.plan.heads:
                    squares[name] = self.head_squares(name, update)
        return {name: squares[name].sqrt() for name in self.plan.heads} if measure else {}

    def head_squares(self, name: str, update: Tensor) -> Tensor:
        return update.reshape(self.plan.heads[name], -1).square().sum(1)

    def zero_grad(self) -> None:
        for tensor in self.parameters.values():
            tensor.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors that share memory with the running state."""
        state = {"count": self.count}
        for bucket in self.buckets:
            state |= {f"momentum.{name}": m for name, m in bucket.state().items()}
        for group in self.adamw:
            state |= {f"mean.{name}": m for name, m in zip(group.names, group.mean, strict=True)}
            state |= {f"square.{name}": s for name, s in zip(group.names, group.square, strict=True)}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved state in. Raises ValueError naming the first tensor that is missing, unknown or misshapen."""
        own = self.state_dict()
        for name in sorted(own.keys() ^ state.keys()):
            raise ValueError(f"optimizer state: {name} is {'missing' if name in own else 'unknown'}")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(f"optimizer state: {name} is {list(state[name].shape)}, expected {list(tensor.shape)}")
            tensor.copy_(state[name])
