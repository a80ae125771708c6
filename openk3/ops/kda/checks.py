"""What the KDA functions demand of their arguments; every message names the value and what was expected."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from openk3.ops.kda.gate import BoundedGate


def check_tokens(q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate: BoundedGate | None) -> None:
    """Raises ValueError unless all token tensors agree on [T, H, K], [T, H, V], [T, H]; TypeError for wrong dtypes."""
    if k.dim() != 3 or v.dim() != 3:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [T, H, K] and [T, H, V]")
    T, H, K = k.shape
    named = {"q": (q, (T, H, K)), "v": (v, (T, H, v.shape[2])), "g": (g, (T, H, K)), "beta": (beta, (T, H))}
    if gate is not None:
        named |= {"gate.A_log": (gate.A_log_H, (H,)), "gate.dt_bias": (gate.dt_bias_HK, (H, K))}
        if not -5.0 <= gate.lower_bound < 0.0:
            raise ValueError(f"gate.lower_bound is {gate.lower_bound}, expected a number in [-5, 0)")
    for name, (x, shape) in named.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {shape} to fit k {(T, H, K)}")
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}, expected a floating-point dtype")


def sequence_bounds(cu_seqlens: Tensor, T: int) -> tuple[int, ...]:
    """cu_seqlens as numbers. Raises ValueError unless it rises from 0 to T, TypeError unless it holds integers."""
    if cu_seqlens.is_floating_point():
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}, expected int32 or int64")
    bounds = tuple(cu_seqlens.tolist())
    if not bounds or bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens {list(bounds)} must start at 0, never fall, and end at T = {T}")
    return bounds


def cut_offsets(state_offsets: Tensor | Sequence[int] | None, T: int) -> tuple[int, ...]:
    """Offsets as numbers. Raises ValueError unless each lies in 1 .. T."""
    if state_offsets is None:
        return ()
    values = state_offsets.tolist() if isinstance(state_offsets, Tensor) else list(state_offsets)
    for o in values:
        if not isinstance(o, int):
            raise TypeError(f"state offset {o!r} is not an integer")
        if not 1 <= o <= T:
            raise ValueError(f"state offset {o} does not follow a token: expected 1 to T = {T}")
    return tuple(values)


def check_state(initial_state: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    """Raises ValueError unless the state is [N, H, K, V]."""
    if initial_state is not None and initial_state.shape != shape:
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, expected [N, H, K, V] = {shape}")


def slot_numbers(slots: Tensor, pool: int, T: int) -> list[int]:
    """Slots as numbers; -1 is none. Raises ValueError if one is out of range or named twice, or T is no multiple."""
    numbers = slots.tolist()
    live = [s for s in numbers if s != -1]
    for s in live:
        if not 0 <= s < pool:
            raise ValueError(f"slot {s} is not in the pool: expected -1 (skip) or 0 to {pool - 1}")
    if len(set(live)) != len(live):
        raise ValueError(f"slots {numbers} name a slot twice: each is updated in place, once")
    if (T % len(numbers) if numbers else T) != 0:
        raise ValueError(f"{T} tokens do not divide evenly over {len(numbers)} slots")
    return numbers


def check_pool(state_SHKV: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless the pool is [S, H, K, V] for these tokens, TypeError unless floating."""
    shape = (*k.shape[1:], v.shape[2])
    if state_SHKV.dim() != 4 or state_SHKV.shape[1:] != shape:
        raise ValueError(f"state pool has shape {tuple(state_SHKV.shape)}, expected [S, H, K, V] with {shape}")
    if not state_SHKV.dtype.is_floating_point or state_SHKV.dtype == torch.float16:
        raise TypeError(f"state pool has dtype {state_SHKV.dtype}, expected float32 (or float64, bfloat16)")
