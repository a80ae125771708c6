"""The learning rate over a run."""

import math

import pytest

from openk3.train.schedule import learning_rate, warmup_steps


def rates(steps, **settings):
    return [learning_rate(step, steps, peak=2.0, **settings) for step in range(steps)]


@pytest.mark.row(93)
def test_one_percent_linear_warm_up_then_cosine_to_a_tenth():
    lr = rates(1000)
    assert lr[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)], abs=1e-15)
    assert max(lr) == lr[9] == 2.0
    assert lr[-1] == pytest.approx(0.2, rel=1e-12)
    middle = (10 + 990 / 2) - 1  # half of the way down
    assert lr[int(middle)] == pytest.approx((2.0 + 0.2) / 2, rel=1e-12)
    for step in (100, 400, 900):
        cosine = math.cos(math.pi * (step + 1 - 10) / 990)
        assert lr[step] == pytest.approx(0.2 + 1.8 * (1 + cosine) / 2, rel=1e-12)
    assert all(a > b for a, b in zip(lr[9:], lr[10:], strict=False))


def test_short_runs_and_extreme_shares():
    assert rates(1) == [2.0]
    assert rates(2) == [2.0, pytest.approx(0.2)]
    assert warmup_steps(50, 0.01) == 1  # at least one
    assert rates(4, warmup=1.0) == [0.5, 1.0, 1.5, 2.0]
    assert rates(3, min_ratio=0.0)[-1] == pytest.approx(0.0, abs=1e-15)
    assert rates(3, min_ratio=1.0) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run(step):
    with pytest.raises(ValueError, match=f"step = {step} is not in a run of 10 steps"):
        learning_rate(step, 10, peak=1.0)
