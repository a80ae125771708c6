"""float32 against float64 where it is hard: every gate, strong and slow, near-parallel keys, decays without a bound."""

import pytest
import torch
from kda_cases import Case, cu, draw, gated, largest, rms_ratio, run, ungated, uniform, with_gradients

from openk3.ops.kda import BoundedGate

T, H, K, V = 100, 2, 16, 12

# The ten cases of logits z and (A_log, dt_bias), and the sets strong, slow and mixed.
LOGITS = {
    "-8": lambda: draw(T, H, K) * 0 - 8,
    "-4": lambda: draw(T, H, K) * 0 - 4,
    "0": lambda: draw(T, H, K) * 0,
    "8": lambda: draw(T, H, K) * 0 + 8,
    "U(-8,8)": lambda: uniform(-8, 8, T, H, K),
    "N(0,8)": lambda: draw(T, H, K) * 8,
}
BIASED = {"-8", "0", "U(-8,8)", "N(0,8)"}
CASES = [(name, False) for name in LOGITS] + [(name, True) for name in LOGITS if name in BIASED]
SETS = ["strong", "slow", "mixed"]


def gate_case(name: str, biased: bool) -> Case:
    if name in SETS:
        return gated(T, 1, H, K, V, name)
    case = gated(T, 1, H, K, V)
    bias = (uniform(0, 1, H), uniform(0, 1, H, K)) if biased else (draw(H) * 0, draw(H, K) * 0)
    return case._replace(g=LOGITS[name](), gate=BoundedGate(*bias)).to(torch.float64)


@pytest.mark.row(11)
@pytest.mark.parametrize(("name", "biased"), [*CASES, *((name, True) for name in SETS)])
@pytest.mark.parametrize("beta_mean", [0.0, -4.0, 3.0])
def test_float32_follows_float64(name: str, biased: bool, beta_mean: float) -> None:
    """Also the gradients of the gate: on strong gates they are what is left after two sums have almost cancelled."""
    case = gate_case(name, biased)
    case = case._replace(beta=case.beta.detach() + beta_mean).to(torch.float64)
    single = case.to(torch.float32)
    want, got = run(case, cu(T), backend="reference"), run(single, cu(T), backend="torch")
    for a, b in zip(got, want, strict=True):
        assert rms_ratio(a, b) < 2e-6
    wanted, gradients = with_gradients(case, want), with_gradients(single, got)
    # What A_log's gradient sums, term by term: one head's sum may cancel to nothing, so it is judged by its terms.
    terms = wanted.pop("A_log"), gradients.pop("A_log")
    for label in wanted:
        # At logit 8 the slope of the gate is 1 - sigma = 3e-4, of which float32 keeps four digits.
        limit = 5e-4 if label in ("g", "dt_bias") else 2e-6
        assert rms_ratio(gradients[label], wanted[label]) < limit, label
    size = (wanted["g"] * (case.g + case.gate.dt_bias_HK)).abs().sum((0, 2))
    assert ((terms[0] - terms[1].double()).abs() <= 1e-4 * size + 1e-9).all()


@pytest.mark.row(15)
def test_log_scale_has_one_gradient_a_head() -> None:
    case = gated(40, 1, H=3)
    o, _ = run(case, cu(40), backend="torch")
    (gradient,) = torch.autograd.grad(o[:, 1].sum(), case.gate.A_log_H)
    assert gradient.shape == (3,)
    assert gradient[1].abs() > 1e-4
    assert gradient[0] == gradient[2] == 0


def parallel_keys(noise: float, logit: float, z: float, tokens: int = 320) -> Case:
    """Keys that differ from one direction by `noise` of its length, writes of almost full strength, little decay."""
    case = gated(tokens, 1, 1, 32, 32)
    direction = torch.nn.functional.normalize(draw(1, 1, 32), dim=-1)
    k = direction + noise * torch.nn.functional.normalize(draw(tokens, 1, 32), dim=-1)
    gate = BoundedGate(draw(1) * 0, draw(1, 32) * 0)
    beta = torch.full((tokens, 1), logit, dtype=torch.float64)
    return case._replace(k=k, g=torch.full_like(case.g, z), beta=beta, gate=gate).to(torch.float64)


@pytest.mark.parametrize(
    ("noise", "beta", "z"),
    [(0.0, 1.0, -12), (0.02, 1.0, -12), (0.05, 0.98, -8), (0.1, 0.99, -12), (0.3, 0.95, -8), (0.0, 1.0, 0.4)],
)
def test_near_parallel_keys(noise: float, beta: float, z: float) -> None:
    """Where an inverse by powers of L blows up to inf in half precision, and to 1e-3 of error in float32."""
    case = parallel_keys(noise, 20.0 if beta == 1.0 else float(torch.logit(torch.tensor(beta))), z)
    single = case.to(torch.float32)
    want, got = run(case, cu(320), backend="reference"), run(single, cu(320), backend="torch")
    for a, b in zip(got, want, strict=True):
        assert rms_ratio(a, b) < 1e-5
    wanted, gradients = with_gradients(case, want), with_gradients(single, got)
    if beta == 1.0:  # at logit 20 float32 has sigma = 1 and no slope; float64 has 2e-9
        assert largest(gradients.pop("beta").double(), wanted.pop("beta")) < 1e-6
    for label in set(wanted) - {"A_log"}:  # one head, one number: its terms cancel
        assert rms_ratio(gradients[label], wanted[label]) < 1e-3, label


@pytest.mark.row(13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lowest", [-20.0, -1e4, -1e30, -torch.inf])
def test_decays_without_a_bound(dtype: torch.dtype, lowest: float) -> None:
    """One token that forgets everything does not spoil the small decays around it."""
    case = ungated(100, 1, 2, 8, 6, spread=0.0)
    with torch.no_grad():
        case.g.mul_(0.01)
        case.g[10], case.g[33, :, :4], case.g[50:70] = lowest, lowest, lowest
    single = case.to(dtype)
    want, got = run(case, cu(100), backend="reference"), run(single, cu(100), backend="torch")
    limit = 1e-12 if dtype == torch.float64 else 2e-6
    for a, b in zip(got, want, strict=True):
        assert largest(a.double(), b) < limit
    wanted, gradients = with_gradients(case, want), with_gradients(single, got)
    if lowest <= -1e4:  # exactly: whatever made such a decay multiplies this by it
        assert (gradients["g"][case.g == lowest] == 0).all()
    for label in wanted:
        if lowest == -torch.inf and label == "g":  # the recurrence multiplies 0 by -inf there
            assert gradients[label].isfinite().all()
            continue
        assert largest(gradients[label].double(), wanted[label]) < 100 * limit, label


def test_a_nan_stays_in_its_sequence() -> None:
    case = gated(100, 3)
    with torch.no_grad():
        for x in (case.q, case.k, case.v, case.g, case.beta):
            x[0] = torch.nan
    o, final = run(case, cu(30, 33, 37), backend="torch")
    assert o[30:].isfinite().all()
    assert final[1:].isfinite().all()
    assert final[0].isnan().any()
    gradients = torch.autograd.grad((o[30:].sum() + final[1:].sum()), case.leaves[:5])
    assert all(g[30:].isfinite().all() for g in gradients)
