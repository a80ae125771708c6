"""Inputs that the tests of KDA share: token tensors, gates of every strength, and a call that returns gradients too."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.kda import BoundedGate, kda


class Case(NamedTuple):
    """The tensors of one call; `gate` is None where g is the log decay itself."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: BoundedGate | None
    state: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        gate = () if self.gate is None else (self.gate.A_log_H, self.gate.dt_bias_HK)
        return [self.q, self.k, self.v, self.g, self.beta, *gate, self.state]

    def to(self, dtype: torch.dtype) -> "Case":
        q, k, v, g, beta, *gate, state = (x.detach().to(dtype).requires_grad_() for x in self.leaves)
        return Case(q, k, v, g, beta, BoundedGate(*gate) if gate else None, state)


NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")


def cu(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def uniform(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, dtype=torch.float64)


# Logits, A_log and dt_bias: the two sets that every claim is made on.
GATES: dict[str, Callable[[int, int, int], tuple[Tensor, Tensor, Tensor]]] = {
    "strong": lambda T, H, K: (draw(T, H, K), uniform(0, 1, H), uniform(0, 1, H, K)),
    "slow": lambda T, H, K: (uniform(-12, -8, T, H, K), draw(H) * 0, draw(H, K) * 0),
    "mixed": lambda T, H, K: (
        torch.where(torch.arange(K) < K // 2, uniform(-12, -8, T, H, K), uniform(4, 8, T, H, K)),
        draw(H) * 0,
        draw(H, K) * 0,
    ),
}


def gated(T: int, N: int, H: int = 2, K: int = 8, V: int = 6, regime: str = "strong") -> Case:
    """float64 leaves, raw logits and a gate of K3, a state that is not zero."""
    z, A_log, dt_bias = GATES[regime](T, H, K)
    case = Case(
        draw(T, H, K), draw(T, H, K), draw(T, H, V), z, draw(T, H), BoundedGate(A_log, dt_bias), draw(N, H, K, V)
    )
    return case.to(torch.float64)


def ungated(T: int, N: int, H: int = 2, K: int = 8, V: int = 6, spread: float = 2.0) -> Case:
    """The same with log decays given as they are: -exp(spread * N(0, 1)), from almost none to very strong."""
    g, beta = -draw(T, H, K).mul(spread).exp(), draw(T, H).sigmoid()
    return Case(draw(T, H, K), draw(T, H, K), draw(T, H, V), g, beta, None, draw(N, H, K, V)).to(torch.float64)


def run(case: Case, cu_seqlens: Tensor, **options) -> tuple[Tensor, ...]:
    return kda(*case[:5], gate=case.gate, initial_state=case.state, cu_seqlens=cu_seqlens, **options)


def with_gradients(case: Case, outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Gradients of a fixed random weighting of all outputs, by name."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    loss = sum((w * o).sum() for w, o in zip(weights, outputs, strict=True))
    names = [n for n in NAMES if case.gate is not None or n not in ("A_log", "dt_bias")]
    return dict(zip(names, torch.autograd.grad(loss, case.leaves), strict=True))


def rms_ratio(got: Tensor, want: Tensor) -> float:
    """RMS(difference) / RMS(wanted)."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def largest(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference, 0 for nothing to compare; nan counts as infinite."""
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} and {tuple(want.shape)}")
    return float((got - want).detach().abs().nan_to_num(nan=torch.inf).max()) if got.numel() else 0.0
