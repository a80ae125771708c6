"""Observers of a training run: more fields in its "train" lines (`openk3 train ... --watch NAME`).

An observer looks at tensors as they pass by and changes none of them: the losses are those of the same run unobserved,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openk3.errors import UserError
from openk3.model.k3 import Layer
from openk3.model.mlp import MLP
from openk3.model.moe import ExpertStack
from openk3.train.loop import Watch
from openk3.train.prepare import Run

DEPTH_EVERY = 5  # steps between two rows by depth
Fields = Callable[[], dict[str, Any]]


def activations(run: Run) -> Fields:
    """ "act_experts", "act_mlp": the largest absolute input of a down projection in the step, over routed experts and
    over dense and shared FFNs; "w_max": the largest absolute value of any matrix parameter after the update."""
    largest: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        peak = x.detach().abs().amax() if x.numel() else x.new_zeros(())
        largest[name] = torch.maximum(largest[name], peak) if name in largest else peak

    def see_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training:
            see("act_mlp", inputs[0])

    for module in run.model.modules():
        if isinstance(module, MLP):
            module.down_proj.register_forward_pre_hook(see_input)
        if isinstance(module, ExpertStack):
            module.act = partial(seen_activation, module, module.act, partial(see, "act_experts"))
    matrices = [p for p in run.model.parameters() if p.dim() >= 2]

    def fields() -> dict[str, Any]:
        found = {name: float(value) for name, value in sorted(largest.items())}
        largest.clear()
        return found | {"w_max": max(float(p.detach().abs().amax()) for p in matrices)}

    return fields


def seen_activation(
    stack: ExpertStack, act: Callable[[Tensor, Tensor], Tensor], see: Callable[[Tensor], None], gate: Tensor, up: Tensor
) -> Tensor:
    """The activation of an expert stack, shown to `see` in training."""
    out = act(gate, up)
    if stack.training:
        see(out)
    return out


def depth(run: Run) -> Fields:
    """Every few steps, by sub-layer from the first attention to the last FFN: "out_rms", the RMS of what it adds, in
    the last micro-batch; "out_grad", the norm over the batch of the gradient of the mean loss there, not clipped."""
    rms: dict[int, Tensor] = {}
    squares: dict[int, Tensor] = {}

    def due() -> bool:
        return run.step % DEPTH_EVERY == 0 or run.step + 1 == run.recipe.steps

    def see_gradient(place: int, gradient: Tensor) -> None:
        squares[place] = squares.get(place, 0) + gradient.detach().double().square().sum()

    def see_output(place: int, module: nn.Module, inputs: Any, out: Tensor) -> None:
        if module.training and due():
            rms[place] = out.detach().double().square().mean().sqrt()
            out.register_hook(partial(see_gradient, place))

    for i, layer in enumerate(run.model.model.layers):
        assert isinstance(layer, Layer)
        layer.self_attn.register_forward_hook(partial(see_output, 2 * i))
        getattr(layer, layer.ffn_name).register_forward_hook(partial(see_output, 2 * i + 1))

    def fields() -> dict[str, Any]:
        if not squares:
            return {}
        found = {
            "out_rms": [float(rms[place]) for place in sorted(rms)],
            "out_grad": [float(squares[place].sqrt()) for place in sorted(squares)],
        }
        rms.clear()
        squares.clear()
        return found

    return fields


OBSERVERS: dict[str, Watch] = {"activations": activations, "depth": depth}


def observer(name: str) -> Watch:
    """An observer by name. Raises UserError listing the names."""
    if name not in OBSERVERS:
        raise UserError(f"there is no observer {name!r}; the observers are {', '.join(OBSERVERS)}")
    return OBSERVERS[name]
