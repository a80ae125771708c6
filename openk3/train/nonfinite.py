"""Finding where a NaN or an infinity came from: the batch again, with hooks on every module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openk3.data.loader import Batch
from openk3.model.k3 import K3
from openk3.train.evaluate import nats


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All float tensors in an output, nested tuples and lists included."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def first_non_finite(model: K3, parts: Iterable[Batch]) -> str:
    """Words for the first place, in the order of computation, that is not finite.

    A weight; else the output of the innermost module; else, walking backwards, the gradient at a module's output or
    at a parameter. Leaves the model's hooks as they were, and gradients of the batch in place.
    """
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            return f"the weight {name}"
    found: list[str] = []
    hooks: list[Any] = []

    def see_gradient(where: str, gradient: Tensor) -> None:
        if not found and not is_finite(gradient):
            found.append(where)

    def see_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if not found and not is_finite(tensor):
                found.append(f"the output of {name}")
            if tensor.requires_grad:
                tensor.register_hook(partial(see_gradient, f"the gradient at the output of {name}"))

    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(partial(see_output, name or "the model")))
    for name, weight in model.named_parameters():
        hooks.append(weight.register_hook(partial(see_gradient, f"the gradient of {name}")))
    try:
        for part in parts:
            loss = nats(model, part)
            if not found and not is_finite(loss):
                found.append("the loss")
            if not found:
                loss.backward()
            if found:
                break
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "no single module (the sum over the batch overflowed)"
