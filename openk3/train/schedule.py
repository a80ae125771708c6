"""Learning rate: linear warm-up, then one cosine down to a floor (report sections 3.2 and 3.3).

A pure function of the step, so that a resumed run needs no scheduler state. The floor is not published; a tenth of
the peak is our default (training.md section 5).
"""

from __future__ import annotations

import math


def warmup_steps(steps: int, warmup: float) -> int:
    """Steps of linear warm-up: the given share of the run, at least one."""
    return min(steps, max(1, round(warmup * steps)))


def learning_rate(step: int, steps: int, *, peak: float, warmup: float = 0.01, min_ratio: float = 0.1) -> float:
    """Rate of step number `step`, counted from 0, in a run of `steps`.

    Rises to `peak` at the last warm-up step and falls on a cosine to `min_ratio * peak` at the last step.
    Raises ValueError when the step lies outside the run.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step = {step} is not in a run of {steps} steps, 0..{steps - 1}")
    rising = warmup_steps(steps, warmup)
    if step < rising:
        return peak * (step + 1) / rising
    progress = (step + 1 - rising) / (steps - rising)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
