"""KDA against values from outside: golden numbers, another library, and what the equations say in words."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kda_cases import cu, draw, gated, largest, run, uniform

from openk3.ops.kda import BoundedGate, compose, kda, kda_segment
from openk3.ops.kda.gate import activate

BACKENDS = ["reference", "torch"]


def tensors(values: dict, *names: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.tensor(values[name], dtype=dtype) for name in names]


def golden_call(case: dict, dtype: torch.dtype, backend: str, state: bool) -> tuple[torch.Tensor, ...]:
    H, K = case["shape"]["H"], case["shape"]["d_k"]
    q, k, v, z, beta, A_log, dt_bias, initial = tensors(
        case["inputs"],
        "q_raw",
        "k_raw",
        "v",
        "z",
        "beta_logits",
        "A_log_stored",
        "dt_bias",
        "initial_state",
        dtype=dtype,
    )
    gate = BoundedGate(A_log[:H], dt_bias.view(H, K))
    return kda(
        q, k, v, z, beta, gate=gate, cu_seqlens=cu(case["shape"]["T"]), backend=backend,
        initial_state=initial[None] if state else None, state_offsets=[16, 32],
    )  # fmt: skip


@pytest.mark.row(1, 8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float64, "float64"), (torch.float32, "float32")])
def test_golden_values(golden: Callable, backend: str, dtype: torch.dtype, kind: str) -> None:
    case = golden("kda_small")
    limit = case["tolerance"][kind]
    for state, name in ((False, "zero_state"), (True, "with_initial_state")):
        o, final, states = golden_call(case, dtype, backend, state)
        want = case["expected"][name]
        wanted_o, wanted_final = tensors(want, "o", "final_state")
        assert largest(o.double(), wanted_o) <= limit
        assert largest(final[0].double(), wanted_final) <= limit
        if state:
            wanted = torch.stack(tensors(want, "state_after_16", "state_after_32"))
            assert largest(states.double(), wanted) <= limit


@pytest.mark.row(8)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_usual_mistakes_are_not_made(golden: Callable, backend: str) -> None:
    case = golden("kda_small")
    last = golden_call(case, torch.float64, backend, state=True)[0][-1]
    for wrong in case["wrong_variants"]["items"]:
        far = largest(last, torch.tensor(wrong["o_last"], dtype=torch.float64))
        assert far > 1e-4, wrong["mistake"]


def test_golden_gate(golden: Callable) -> None:
    case = golden("kda_small")
    H, K = case["shape"]["H"], case["shape"]["d_k"]
    z, beta, A_log, dt_bias = tensors(case["inputs"], "z", "beta_logits", "A_log_stored", "dt_bias")
    g, beta = activate(z, beta, BoundedGate(A_log[:H], dt_bias.view(H, K)))
    first, total, wanted_beta = tensors(case["expected"], "g_first_4_tokens", "g_sum_over_tokens", "beta")
    assert largest(g[:4], first) < 1e-12
    assert largest(g.sum(0), total) < 1e-12
    assert largest(beta, wanted_beta) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_segment(golden: Callable, backend: str) -> None:
    case = golden("kda_small")
    H, K = case["shape"]["H"], case["shape"]["d_k"]
    k, v, z, beta, A_log, dt_bias = tensors(case["inputs"], "k_raw", "v", "z", "beta_logits", "A_log_stored", "dt_bias")
    gate = BoundedGate(A_log[:H], dt_bias.view(H, K))
    M, S = kda_segment(k[:16], v[:16], z[:16], beta[:16], gate=gate, cu_seqlens=cu(16), backend=backend)
    transition, local = tensors(case["expected"]["segment_0_to_16"], "transition", "local")
    assert largest(M[0], transition) < 1e-12
    assert largest(S[0], local) < 1e-12


def load_naive() -> ModuleType:
    """The plain recurrence of flash-linear-attention, from its file: importing the package takes ten seconds."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("flash-linear-attention, the other library, is not installed")
    file = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_kda_naive", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.row(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", ["strong", "slow"])
def test_against_another_library(backend: str, regime: str) -> None:
    naive = load_naive()
    case = gated(50, 1, H=3, K=16, V=12, regime=regime)
    o, final = run(case, cu(50), backend=backend)
    unit = torch.nn.functional.normalize
    g, beta = activate(case.g, case.beta, case.gate)
    wanted_o, wanted_final = naive.naive_recurrent_kda(
        *(x[None] for x in (unit(case.q, dim=-1), unit(case.k, dim=-1), case.v, g, beta)),
        initial_state=case.state,
        output_final_state=True,
    )
    # The other library works in float32, and normalises without the 1e-6.
    assert largest(o, wanted_o[0].double()) < 2e-5
    assert largest(final, wanted_final.double()) < 2e-5


@pytest.mark.row(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_a_key_again_replaces_its_value(backend: str) -> None:
    key = draw(1, 2, 8)
    v = draw(2, 2, 6)
    o, _ = kda(
        key.expand(2, -1, -1), key.expand(2, -1, -1), v, torch.full((2, 2, 8), -60.0, dtype=torch.float64),
        torch.full((2, 2), 40.0, dtype=torch.float64), scale=1.0, cu_seqlens=cu(2), backend=backend,
        gate=BoundedGate(draw(2) * 0, draw(2, 8) * 0),
    )  # fmt: skip
    assert largest(o[0], v[0]) < 1e-5
    assert largest(o[1], v[1]) < 1e-5  # v[0] + v[1] under a sum rule


@pytest.mark.row(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_beta_zero_is_pure_decay(backend: str) -> None:
    case = gated(40, 1, regime="slow")
    g, _ = activate(case.g, case.beta, case.gate)
    o, final = kda(
        case.q,
        case.k,
        case.v,
        g,
        case.beta * 0,
        cu_seqlens=cu(40),
        initial_state=case.state,
        scale=1.0,
        backend=backend,
    )
    decay = g.cumsum(0).exp()
    assert largest(final[0], decay[-1, ..., None] * case.state[0]) < 1e-12
    q = case.q / (case.q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert largest(o, torch.einsum("thk,thk,hkv->thv", q, decay, case.state[0])) < 1e-12


@pytest.mark.row(4)
def test_beta_is_a_sigmoid_without_a_factor() -> None:
    _, beta = activate(
        draw(5, 2, 4), torch.linspace(-50, 30, 10, dtype=torch.float64).view(5, 2), BoundedGate(draw(2), draw(2, 4))
    )
    assert ((beta > 0) & (beta < 1)).all()
    # Through the op: at logit 50 a write to a unit key reads back as v, not as 2 v.
    key, v = draw(1, 2, 4), draw(1, 2, 3)
    for backend in BACKENDS:
        o, _ = kda(
            key, key, v, draw(1, 2, 4), draw(1, 2) * 0 + 50, gate=BoundedGate(draw(2), draw(2, 4)), scale=1.0,
            cu_seqlens=cu(1), backend=backend,
        )  # fmt: skip
        assert largest(o, v) < 1e-5


@pytest.mark.row(12)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decay_stays_above_the_bound(backend: str) -> None:
    z = torch.tensor([-1e4, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4], dtype=torch.float64)
    gate = BoundedGate(draw(7), draw(7, 4))
    g, _ = activate(z[None, :, None].expand(1, 7, 4), draw(1, 7), gate)
    assert ((g >= -5) & (g <= 0)).all()
    zero = activate(z[3:4, None].expand(1, 1, 4), draw(1, 1), BoundedGate(draw(1) * 0, draw(1, 4) * 0))[0]
    assert largest(zero, torch.full_like(zero, -2.5)) == 0
    # Through the op, nothing written: what is left of a state is the decay itself.
    state = torch.ones(1, 7, 4, 3, dtype=torch.float64)
    _, final = kda(
        draw(1, 7, 4), draw(1, 7, 4) * 0, draw(1, 7, 3), z[None, :, None].expand(1, 7, 4), draw(1, 7), gate=gate,
        cu_seqlens=cu(1), initial_state=state, backend=backend,
    )  # fmt: skip
    assert ((final > 6.73e-3) & (final <= 1)).all()
    assert largest(final[0], g[0].exp()[..., None].expand(7, 4, 3)) < 1e-14


@pytest.mark.row(12)
def test_lower_bound_is_an_argument() -> None:
    case = gated(30, 1)
    weaker = case.gate._replace(lower_bound=-1.0)
    assert activate(case.g, case.beta, weaker)[0].min() >= -1.0
    outputs = [run(case._replace(gate=weaker), cu(30), backend=backend) for backend in BACKENDS]
    assert largest(outputs[0][0], outputs[1][0]) < 1e-12
    assert largest(outputs[0][0], run(case, cu(30))[0]) > 1e-3


@pytest.mark.row(13)
def test_sixteen_tokens_fit_bfloat16_with_the_bound_only() -> None:
    z, beta = uniform(40, 60, 16, 1, 8), draw(16, 1)
    g, _ = activate(z, beta, BoundedGate(draw(1) * 0, draw(1, 8) * 0))
    softplus = -torch.nn.functional.softplus(z)
    inverse = [(-x.cumsum(0)).exp() for x in (g, softplus)]
    assert inverse[0].to(torch.bfloat16).isfinite().all()
    assert inverse[0].to(torch.float32).isfinite().all()
    assert not inverse[0].to(torch.float16).isfinite().all()
    assert not inverse[1].to(torch.bfloat16).isfinite().all()


@pytest.mark.row(16)
def test_initial_decay_bias() -> None:
    dt = torch.logspace(-3, -1, 50, dtype=torch.float64)
    bias = torch.log(torch.expm1(dt))  # inverse softplus
    g, _ = activate(draw(1, 1, 50) * 0, draw(1, 1), BoundedGate(draw(1) * 0, bias[None]))
    keep = g.exp().flatten()
    assert largest(keep, torch.exp(-5 * (1 - torch.exp(-dt)))) < 1e-12
    assert 0.621 < keep.min() < 0.622
    assert 0.995 < keep.max() < 0.9951


@pytest.mark.parametrize("backend", BACKENDS)
def test_epsilon_is_added_to_the_sum_of_squares(backend: str) -> None:
    tiny = torch.full((1, 1, 4), 1e-3, dtype=torch.float64)  # sum of squares 4e-6, of the size of the 1e-6
    v = draw(1, 1, 3)
    o, _ = kda(tiny, tiny, v, draw(1, 1, 4) * 0, draw(1, 1) * 0 + 1, cu_seqlens=cu(1), scale=1.0, backend=backend)
    assert largest(o, v * 0.8) < 1e-12  # |unit|^2 = 4e-6 / (4e-6 + 1e-6)


def test_composition_is_ordered() -> None:
    case = gated(48, 2, regime="slow")
    case = case._replace(beta=case.beta.detach() - 4)
    M, S = kda_segment(case.k, case.v, case.g, case.beta, gate=case.gate, cu_seqlens=cu(20, 28))
    whole = kda_segment(case.k, case.v, case.g, case.beta, gate=case.gate, cu_seqlens=cu(48))
    both = compose((M[1:], S[1:]), (M[:1], S[:1]))
    assert largest(both[0], whole[0]) < 1e-12
    assert largest(both[1], whole[1]) < 1e-12
    swapped = compose((M[:1], S[:1]), (M[1:], S[1:]))
    assert largest(swapped[0], whole[0]) > 1e-3
    assert largest(S[:1] + S[1:], whole[1]) > 1e-2  # adding local states is wrong
