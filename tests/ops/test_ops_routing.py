"""The sigmoid router: what selects, what weighs, ties, cutoff, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.ops.routing import loads, max_violation, route, sign_step, top_lowest_first


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.row(60)
def test_scores_are_sigmoids_each_for_itself():
    logits = draw(5, 7)
    r = route(logits, torch.zeros(7, dtype=torch.float64), 2)
    torch.testing.assert_close(r.scores_TE, 1 / (1 + torch.exp(-logits)), rtol=0, atol=1e-15)
    raised = logits.clone()
    raised[:, 3] += 5  # a softmax would lower all others
    others = [0, 1, 2, 4, 5, 6]
    again = route(raised, torch.zeros(7, dtype=torch.float64), 2)
    assert torch.equal(again.scores_TE[:, others], r.scores_TE[:, others])
    assert (r.scores_TE.sum(-1) - 1).abs().min() > 0.1


@pytest.mark.row(61)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_selects_and_does_not_weigh(dtype):
    logits, bias = draw(50, 8).to(dtype), 0.3 * draw(8, seed=1).to(dtype)
    r = route(logits, bias, 3)
    s = torch.sigmoid(logits)
    selected = s.gather(1, r.ids_TK)
    torch.testing.assert_close(r.weights_TK, selected / selected.sum(-1, keepdim=True))
    torch.testing.assert_close(r.weights_TK.sum(-1), torch.ones(50, dtype=dtype))
    nudged = route(logits, bias + 1e-3 * draw(8, seed=2).to(dtype), 3)
    same = (nudged.ids_TK.sort().values == r.ids_TK.sort().values).all(-1)
    assert int(same.sum()) > 25
    order, order_nudged = r.ids_TK.argsort(), nudged.ids_TK.argsort()
    weights, nudged_weights = r.weights_TK.gather(1, order), nudged.weights_TK.gather(1, order_nudged)
    torch.testing.assert_close(nudged_weights[same], weights[same], rtol=1e-6, atol=0)  # same set, same p
    unbiased = route(logits, torch.zeros(8, dtype=dtype), 3)
    assert (unbiased.ids_TK != r.ids_TK).any()  # the bias did select


@pytest.mark.row(64)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n_experts", "k"), [(5, 1), (24, 2), (64, 8)])
def test_selection_and_cutoff_against_a_sort(dtype, n_experts, k):
    logits, bias = draw(40, n_experts).to(dtype), 0.2 * draw(n_experts, seed=1).to(dtype)
    r = route(logits, bias, k)
    by_hand = sorted(range(n_experts), key=lambda e: -float((torch.sigmoid(logits) + bias)[7, e]))
    assert r.ids_TK[7].tolist() == by_hand[:k]
    ranked = (torch.sigmoid(logits) + bias).sort(descending=True).values
    assert torch.equal(r.cutoff_T, ranked[:, k])
    assert r.ids_TK.dtype == torch.int64


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=5),
    n=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_ties_go_to_the_lower_index(rows, n, dtype):
    values = torch.tensor(rows, dtype=dtype) / 3
    values = torch.where(values == 0, -values, values)  # some zeros are -0, which equals 0
    best, ids = top_lowest_first(values, n)
    for row, v, i in zip(rows, best, ids, strict=True):
        expected = sorted(range(6), key=lambda e: (-row[e], e))[:n]
        assert i.tolist() == expected
        assert v.tolist() == (torch.tensor([row[e] for e in expected], dtype=dtype) / 3).tolist()


@pytest.mark.row(65)
def test_centring_changes_no_selection():
    logits, bias = draw(60, 9), draw(9, seed=1)
    r, centred = route(logits, bias, 2), route(logits, bias - bias.mean(), 2)
    assert torch.equal(r.ids_TK, centred.ids_TK)
    assert torch.equal(r.weights_TK, centred.weights_TK)
    torch.testing.assert_close(r.cutoff_T - centred.cutoff_T, bias.mean().expand(60))


@pytest.mark.row(68)
def test_gradients_reach_selected_logits_only_and_never_the_bias():
    logits, bias = draw(30, 8).requires_grad_(), draw(8, seed=1).requires_grad_()
    r = route(logits, bias, 3)
    assert not r.cutoff_T.requires_grad
    pull = draw(30, 3, seed=2)
    grad_logits, grad_bias = torch.autograd.grad((r.weights_TK * pull).sum(), (logits, bias), allow_unused=True)
    assert grad_bias is None
    chosen = torch.zeros(30, 8, dtype=torch.bool).scatter_(1, r.ids_TK, True)
    assert (grad_logits[chosen] != 0).all()
    assert (grad_logits[~chosen] == 0).all()
    # the whole gradient is that of the weights: no term balances loads behind the loss
    leaf = logits.detach().clone().requires_grad_()
    s = torch.sigmoid(leaf).gather(1, r.ids_TK)
    (expected,) = torch.autograd.grad((s / s.sum(-1, keepdim=True) * pull).sum(), leaf)
    torch.testing.assert_close(grad_logits, expected, rtol=0, atol=1e-12)


def test_route_gradcheck():
    logits = (3 * draw(4, 5)).requires_grad_()
    bias = torch.zeros(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: route(x, bias, 2).weights_TK, logits)


def test_scores_are_float32_for_bf16_logits():
    logits = draw(6, 5).bfloat16()
    r = route(logits, torch.zeros(5), 2)
    assert r.scores_TE.dtype == r.weights_TK.dtype == r.cutoff_T.dtype == torch.float32
    torch.testing.assert_close(r.scores_TE, torch.sigmoid(logits.float()))


def test_vanishing_scores_do_not_divide_by_zero():
    r = route(torch.full((2, 4), -200.0), torch.zeros(4), 2)
    assert torch.equal(r.weights_TK, torch.zeros(2, 2))


@pytest.mark.row(62)
def test_sign_step():
    """b_j += rate * sign(mean load - load_j)."""
    bias = torch.tensor([0.1, -0.2, 0.0, 0.3])
    stepped = sign_step(bias, torch.tensor([4, 0, 2, 2]), rate=0.01)
    torch.testing.assert_close(stepped, torch.tensor([0.09, -0.19, 0.0, 0.3]))
    with pytest.raises(ValueError, match="rate = 0"):
        sign_step(bias, torch.tensor([4, 0, 2, 2]), rate=0)


def test_loads_and_violation():
    ids = torch.tensor([[0, 3], [3, 1], [3, 0]])
    assert loads(ids, 5).tolist() == [2, 1, 0, 3, 0]
    assert max_violation(loads(ids, 5)) == pytest.approx(3 / (6 / 5) - 1)
    assert max_violation(torch.tensor([2, 2])) == 0
    assert max_violation(torch.zeros(3, dtype=torch.int64)) == 0


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="k = 4 must be at least 1 and below the number of experts, 4"):
        route(torch.ones(2, 4), torch.zeros(4), 4)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(4,\)"):
        route(torch.ones(2, 4), torch.zeros(3), 1)
