"""How the KDA functions are called: backends, errors that say what is wrong, work and memory."""

import pytest
import torch
from kda_cases import cu, draw, gated, largest, run
from torch.utils.flop_counter import FlopCounterMode

from openk3.ops.kda import BoundedGate, kda, kda_segment, kda_step


def small(**changes) -> dict:
    """A call that is right, but for the changes."""
    values = {
        "q_THK": draw(6, 2, 4), "k_THK": draw(6, 2, 4), "v_THV": draw(6, 2, 3), "g_THK": -draw(6, 2, 4).abs(),
        "beta_TH": torch.rand(6, 2, dtype=torch.float64), "cu_seqlens": cu(2, 4),
    }  # fmt: skip
    return values | changes


WRONG = {
    "q of another width": ({"q_THK": draw(6, 2, 5)}, ValueError, r"q has shape \(6, 2, 5\), expected \(6, 2, 4\)"),
    "fewer values": ({"v_THV": draw(5, 2, 3)}, ValueError, r"v has shape \(5, 2, 3\), expected \(6, 2, 3\)"),
    "more value heads": ({"v_THV": draw(6, 4, 3)}, ValueError, r"v has shape \(6, 4, 3\), expected \(6, 2, 3\)"),
    "g a head": ({"g_THK": draw(6, 2)}, ValueError, r"g has shape \(6, 2\), expected \(6, 2, 4\)"),
    "beta a channel": ({"beta_TH": draw(6, 2, 4)}, ValueError, r"beta has shape .*, expected \(6, 2\)"),
    "k without heads": ({"k_THK": draw(6, 4)}, ValueError, r"k \(6, 4\) .* must be \[T, H, K\]"),
    "integers": ({"v_THV": torch.ones(6, 2, 3, dtype=torch.int64)}, TypeError, "v has dtype torch.int64"),
    "bounds too short": ({"cu_seqlens": cu(2, 3)}, ValueError, r"cu_seqlens \[0, 2, 5\] must .* end at T = 6"),
    "bounds that fall": ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, ValueError, "never fall"),
    "bounds that start late": ({"cu_seqlens": torch.tensor([1, 6])}, ValueError, "start at 0"),
    "bounds as floats": ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "torch.float32, expected int32"),
    "state of one": ({"initial_state": draw(1, 2, 4, 3)}, ValueError, r"expected \[N, H, K, V\] = \(2, 2, 4, 3\)"),
    "offset zero": ({"state_offsets": [0]}, ValueError, "state offset 0 .* expected 1 to T = 6"),
    "offset past the end": ({"state_offsets": torch.tensor([7])}, ValueError, "state offset 7"),
    "offset of a half": ({"state_offsets": [1.5]}, TypeError, "state offset 1.5 is not an integer"),
    "A_log padded": ({"gate": BoundedGate(draw(128), draw(2, 4))}, ValueError, r"gate.A_log has shape \(128,\)"),
    "bias flat": ({"gate": BoundedGate(draw(2), draw(8))}, ValueError, r"gate.dt_bias has shape \(8,\)"),
    "no bound": ({"gate": BoundedGate(draw(2), draw(2, 4), -6.0)}, ValueError, r"lower_bound is -6.0, .* \[-5, 0\)"),
    "unknown backend": ({"backend": "fast"}, ValueError, "backend 'fast' of kda is not available"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_the_value_and_what_was_expected(wrong: str) -> None:
    changes, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        kda(**small(**changes))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 3, 1], "slot 3 is not in the pool"),
        ([0, -2, 1], "slot -2"),
        ([1, 1, 0], "twice"),
        ([0, 1, 2, -1], "evenly"),
    ],
)
def test_errors_of_slots(slots: list[int], message: str) -> None:
    call = small()
    del call["cu_seqlens"]
    with pytest.raises(ValueError, match=message):
        kda_step(**call, state_SHKV=draw(3, 2, 4, 3), slots_N=torch.tensor(slots))


def test_errors_of_the_pool() -> None:
    call = small()
    del call["cu_seqlens"]
    with pytest.raises(ValueError, match=r"state pool has shape \(3, 2, 3, 4\)"):
        kda_step(**call, state_SHKV=draw(3, 2, 3, 4), slots_N=torch.tensor([0]))
    with pytest.raises(TypeError, match=r"torch.float16"):
        kda_step(**call, state_SHKV=draw(3, 2, 4, 3).half(), slots_N=torch.tensor([0]))


def test_backend_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is what runs: only the recurrence can be differentiated twice."""
    case = gated(10, 1)

    def twice() -> None:
        (dv,) = torch.autograd.grad(run(case, cu(10))[0].square().sum(), case.v, create_graph=True)
        dv.sum().backward()

    with pytest.raises(RuntimeError):
        twice()
    monkeypatch.setenv("OPENK3_BACKEND", "kda=reference")
    twice()
    monkeypatch.setenv("OPENK3_BACKEND", "kda=nothing")
    with pytest.raises(ValueError, match="'nothing' of kda is not available"):
        run(case, cu(10))


@pytest.mark.row(20)
@pytest.mark.parametrize("regime", ["strong", "slow"])
def test_work_grows_with_length_not_with_its_square(regime: str) -> None:
    """Floating-point operations of the products, forward and backward: twice the tokens, exactly twice the work."""
    work = []
    for tokens in (256, 512, 1024):
        case = gated(tokens, 1, H=1, K=8, V=8, regime=regime)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(run(case, cu(tokens), backend="torch")[0].sum(), case.leaves)
        work.append(counter.get_total_flops())
    assert work[1] == 2 * work[0]
    assert work[2] == 4 * work[0]
    # One product of all tokens with all tokens would alone be more than everything counted.
    assert work[2] < 2 * 1024 * 1024 * 8 * 3


def test_nothing_is_kept_without_gradients() -> None:
    case, kept = gated(100, 1), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        with torch.no_grad():
            o, final = run(case, cu(100), backend="torch")
        assert o.grad_fn is None
        assert final.grad_fn is None
        assert kept == []
        with torch.inference_mode():
            run(case, cu(100), backend="torch")
        assert kept == []
        run(case, cu(100), backend="torch")
        assert sum(kept) > 100 * 2 * 8


def test_a_step_and_a_segment_leave_no_graph_behind() -> None:
    case, pool = gated(2, 1), draw(2, 2, 8, 6)
    o = kda_step(*case[:5], gate=case.gate, state_SHKV=pool, slots_N=torch.tensor([0, 1]))
    assert o.grad_fn is None
    assert not pool.requires_grad
    M, S = kda_segment(case.k, case.v, case.g, case.beta, gate=case.gate, cu_seqlens=cu(2))
    assert M.grad_fn is not None
    assert S.grad_fn is not None


def test_the_same_numbers_alone_and_in_company() -> None:
    """Each chunk chooses its own treatment, so a neighbour with strong decay changes nothing."""
    case = gated(230, 2, regime="slow")
    with torch.no_grad():
        case.g[100:] = 8.0
    o, final = run(case, cu(100, 130), backend="torch")
    first = case._replace(**{name: getattr(case, name)[:100] for name in ("q", "k", "v", "g", "beta")})
    o_alone, final_alone = run(first._replace(state=case.state[:1]), cu(100), backend="torch")
    assert largest(o[:100], o_alone) < 1e-14
    assert largest(final[:1], final_alone) < 1e-14
