"""Quantile Balancing: golden cases, the histogram form and its sums over ranks, the linear program behind it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from openk3.ops.routing import (
    Routing,
    histogram,
    histogram_bias,
    histogram_quantile,
    loads,
    max_violation,
    quantile_bias,
    required_quantile,
    route,
    sign_step,
    top_lowest_first,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "qb_example.json").read_text())


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=GOLDEN["tolerance"])


def select(scores: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Selected experts and cutoff: route's selection on given scores (those of Figure 5 are no sigmoids)."""
    best, ids = top_lowest_first(scores + bias, k + 1)
    return ids[:, :k], best[:, k]


def skewed(m: int, n: int, skew: float, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    """Logits with a taste that all tokens share."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(m, n, generator=generator, dtype=torch.float64)
    return (noise + skew * torch.randn(n, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.row(63, 64, 66)
@pytest.mark.parametrize("name", ["main", "figure5"])
def test_golden_step(name):
    case = GOLDEN[name]
    scores, before, k, n = f64(case["scores"]), f64(case["bias_before"]), case["k"], case["n"]
    ids, cutoff = select(scores, before, k)
    assert ids[:, 0].tolist() == case["experts_before"]
    assert loads(ids, n).tolist() == case["loads_before"]
    close(cutoff, case["alpha"])
    close(required_quantile(scores, cutoff, k), case["b_hat"])
    after = quantile_bias(scores, cutoff, k)
    close(after, case["bias_after"])
    assert torch.equal(before, f64(case["bias_before"]))  # the batch was routed with the old bias, which stays
    ids, cutoff = select(scores, after, k)  # the new one acts from the next batch on
    assert ids[:, 0].tolist() == case["experts_after"]
    assert loads(ids, n).tolist() == case["loads_after"]
    if "fixed_point" in case:
        close(quantile_bias(scores, cutoff, k), case["bias_after"])
    wrong = case["sign_flipped"]
    close(-after, wrong["bias_after"])
    assert loads(select(scores, -after, k)[0], n).tolist() == wrong["loads_after"]


@pytest.mark.row(63, 64)
def test_wrong_quantile_and_wrong_cutoff_differ():
    case = GOLDEN["main"]
    scores, k = f64(case["scores"]), case["k"]
    _ids, cutoff = select(scores, f64(case["bias_before"]), k)
    for kind in ("linear", "lower"):
        b_hat = -torch.quantile(scores - cutoff[:, None], 1 - k / case["n"], dim=0, interpolation=kind)
        close(b_hat, case["interpolated_quantile"][f"b_hat_{kind}"])
    assert (
        required_quantile(scores, cutoff, k) - f64(case["interpolated_quantile"]["b_hat_linear"])
    ).abs().min() > 0.005
    kth = scores.max(dim=1).values
    close(kth, case["alpha_from_kth"]["alpha"])
    close(required_quantile(scores, kth, k), case["alpha_from_kth"]["b_hat"])


def cleared(r: Routing, b_hat: torch.Tensor) -> torch.Tensor:
    """Tokens of each expert whose required bias lies below b_hat: those with score + b_hat above the cutoff."""
    return (r.cutoff_T[:, None] - r.scores_TE < b_hat).sum(0)


@pytest.mark.row(63)
@pytest.mark.parametrize(("m", "n", "k"), [(96, 8, 2), (60, 12, 3), (50, 7, 2)])
def test_q_tokens_clear_the_cutoff(m, n, k):
    """Whatever q tokens: a tie at the cutoff itself (the required bias is then the old one) counts on both sides."""
    bias = torch.zeros(n, dtype=torch.float64)
    for step in range(4):
        r = route(skewed(m, n, 1.0, seed=step), bias, k)
        b_hat, q = required_quantile(r.scores_TE, r.cutoff_T, k), m * k // n
        at_most = (r.cutoff_T[:, None] - r.scores_TE <= b_hat).sum(0)
        assert ((cleared(r, b_hat) <= q) & (q < at_most)).all()
        bias = quantile_bias(r.scores_TE, r.cutoff_T, k)


@pytest.mark.row(69)
def test_golden_histogram():
    case, form = GOLDEN["main"], GOLDEN["main"]["histogram_form"]
    scores, bias = f64(case["scores"]), f64(case["bias_before"])
    _, cutoff = select(scores, bias, case["k"])
    counts = histogram(scores, cutoff, bias, form["bins"])
    assert counts.dtype == torch.int32
    assert counts.shape == (4, 1000)
    assert (counts.sum(1) == 8).all()
    b_hat = histogram_quantile(counts, bias, case["k"])
    assert (b_hat - f64(form["b_hat"])).abs().max() <= form["tolerance"]
    assert (b_hat - f64(form["target"])).abs().max() <= form["tolerance"]


@pytest.mark.row(69)
@pytest.mark.parametrize(("m", "n", "k", "bins"), [(500, 16, 2, 1000), (257, 64, 4, 1000), (300, 7, 2, 300)])
def test_histogram_is_within_a_bin_of_its_order_statistic(m, n, k, bins):
    """Over many steps: the ceil(q)-th smallest required bias, never farther than one bin."""
    bias = torch.zeros(n)
    for step in range(10):
        r = route(skewed(m, n, 1.0, seed=step, dtype=torch.float32), bias, k)
        counts = histogram(r.scores_TE, r.cutoff_T, bias, bins)
        assert (counts.sum(1) == m).all()
        required = (r.cutoff_T[:, None] - r.scores_TE).double()
        low, high = float(bias.min()) - 1, float(bias.max()) + 1
        assert low < required.min() <= required.max() < high
        target = required.kthvalue(math.ceil(m * k / n), dim=0).values
        b_hat = histogram_quantile(counts, bias, k)
        assert (b_hat - target).abs().max() <= (high - low) / bins * 1.001
        bias = histogram_bias(counts, bias, k)
        torch.testing.assert_close(bias.double(), b_hat - b_hat.mean(), rtol=0, atol=1e-6)


def test_no_token_leaves_the_bias():
    bias = torch.tensor([0.1, -0.1])
    assert torch.equal(histogram_bias(torch.zeros(2, 10, dtype=torch.int32), bias, 1), bias)
    with pytest.raises(ValueError, match="0 tokens"):
        required_quantile(torch.zeros(0, 2), torch.zeros(0), 1)


@pytest.mark.row(71)
def test_averaging_the_quantiles_of_ranks_is_another_rule():
    """Two ranks whose tokens prefer opposite halves: their quantiles average to a bias that does not balance."""
    tilt = torch.tensor([2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    logits = torch.cat([skewed(300, 4, 0.0, seed=0) + tilt, skewed(100, 4, 0.0, seed=1) - tilt])
    zero = torch.zeros(4, dtype=torch.float64)
    r = route(logits, zero, 1)
    whole = required_quantile(r.scores_TE, r.cutoff_T, 1)
    parts = [route(x, zero, 1) for x in logits.split([300, 100])]
    averaged = torch.stack([required_quantile(p.scores_TE, p.cutoff_T, 1) for p in parts]).mean(0)
    assert cleared(r, whole).tolist() == [100] * 4
    assert (cleared(r, averaged) - 100).abs().max() > 20
    counts = [histogram(p.scores_TE, p.cutoff_T, zero) for p in parts]
    summed = histogram_quantile(sum(counts), zero, 1)
    target = (r.cutoff_T[:, None] - r.scores_TE).kthvalue(100, dim=0).values
    assert (summed - target).abs().max() <= 2.001 / 1000  # adding the counts up does find the quantile of all


@pytest.mark.row(67)
def test_quantile_balancing_is_below_the_sign_rule_at_every_step():
    """896 experts, 16 a token, 8192 tokens, strongly skewed static scores; the order, not the numbers."""
    n, k = 896, 16
    logits = skewed(8192, n, 2.0, dtype=torch.float32)
    by_quantile, by_sign = torch.zeros(n), torch.zeros(n)
    scores = torch.sigmoid(logits)
    start = None
    for _ in range(3):
        r = route(logits, by_quantile, k)
        signed = loads((scores + by_sign).topk(k).indices, n)
        violations = max_violation(loads(r.ids_TK, n)), max_violation(signed)
        if start is None:
            start = violations[0]
            assert start > 20
            assert violations[0] == violations[1]
        else:
            assert 10 * violations[0] < violations[1]
            assert (loads(r.ids_TK, n) == 0).sum() == 0  # no dead expert after one step
        by_quantile = histogram_bias(histogram(r.scores_TE, r.cutoff_T, by_quantile), by_quantile, k)
        by_sign = sign_step(by_sign, signed)


def dual(scores: torch.Tensor, alpha_T: torch.Tensor, beta_E: torch.Tensor, k: int) -> float:
    """Dual of balanced assignment (report appendix C): sum max(0, s - alpha - beta) + k sum alpha + q sum beta."""
    m, n = scores.shape
    gain = (scores - alpha_T[:, None] - beta_E).clamp(min=0).sum()
    return float(gain + k * alpha_T.sum() + m * k / n * beta_E.sum())


def balanced_assignment(scores: torch.Tensor, k: int) -> float:
    """Largest sum of scores with k experts a token and m k / n tokens an expert, by a solver."""
    m, n = scores.shape
    rows, columns = np.kron(np.eye(m), np.ones((1, n))), np.kron(np.ones((1, m)), np.eye(n))
    limits = np.concatenate([np.full(m, k), np.full(n, m * k / n)])
    solved = linprog(-scores.flatten().numpy(), A_eq=np.vstack([rows, columns]), b_eq=limits, bounds=(0, 1))
    assert solved.success
    return -solved.fun


@pytest.mark.row(73)
@pytest.mark.parametrize("seed", range(3))
def test_exact_coordinate_descent_on_the_dual_of_a_linear_program(seed):
    m, n, k = 32, 8, 2
    logits = skewed(m, n, 1.0, seed)
    scores = torch.sigmoid(logits)
    optimum = balanced_assignment(scores, k)
    bias, values = torch.zeros(n, dtype=torch.float64), []
    for _ in range(12):
        r = route(logits, bias, k)
        alpha, beta = r.cutoff_T, -bias
        values.append(dual(scores, alpha, beta, k))
        # alpha is the exact minimiser for this beta: no breakpoint of the piecewise linear dual is lower
        for i in (0, m - 1):
            for point in scores[i] - beta:
                moved = alpha.clone()
                moved[i] = point
                assert dual(scores, moved, beta, k) >= values[-1] - 1e-12
        beta = -required_quantile(scores, alpha, k)
        values.append(dual(scores, alpha, beta, k))
        for j in (0, n - 1):
            for point in scores[:, j] - alpha:
                moved = beta.clone()
                moved[j] = point
                assert dual(scores, alpha, moved, k) >= values[-1] - 1e-12
        bias = quantile_bias(scores, alpha, k)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(values, values[1:], strict=False))
    assert optimum - 1e-9 <= values[-1] <= optimum * 1.005
    assert values[0] > optimum * 1.05


@pytest.mark.row(73)
def test_a_balanced_fixed_point_solves_the_linear_program():
    """The golden example ends balanced: its assignment is the solver's optimum, and the dual meets it."""
    case = GOLDEN["main"]
    scores, bias, k = f64(case["scores"]), f64(case["bias_after"]), case["k"]
    ids, cutoff = select(scores, bias, k)
    optimum = balanced_assignment(scores, k)
    assert abs(float(scores.gather(1, ids).sum()) - optimum) < 1e-9
    assert abs(dual(scores, cutoff, -bias, k) - optimum) < 1e-9


@pytest.mark.row(62, 73)
def test_the_sign_rule_is_sign_descent_on_the_same_dual():
    """The dual's slope in beta_j is q - load_j; the sign rule moves b = -beta against it by a fixed step."""
    m, n, k = 32, 8, 2
    logits, bias = skewed(m, n, 1.0), 0.01 * torch.arange(n, dtype=torch.float64)
    r = route(logits, bias, k)
    load = loads(r.ids_TK, n)
    beta = (-bias).requires_grad_()
    # between the k-th and the (k + 1)-th biased score the minimising alpha is flat: take the middle, off the kinks
    ranked = (r.scores_TE + bias).sort(descending=True).values
    alpha = (ranked[:, k - 1] + ranked[:, k]) / 2
    value = (r.scores_TE - alpha[:, None] - beta).clamp(min=0).sum() + m * k / n * beta.sum()
    (slope,) = torch.autograd.grad(value, beta)
    torch.testing.assert_close(slope, m * k / n - load.double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sign_step(bias, load, 1e-3) - bias, 1e-3 * slope.sign(), rtol=0, atol=1e-15)
