"""The context curriculum: short sequences first, long ones late (report sections 3.3 and 3.4).

    context = 1024                                      one stage
    context = [[256, 0.85], [512, 0.1], [2048, 0.05]]   [tokens of a sequence, share of the run], in order

A stage changes how documents are cut into sequences and nothing else: attention without positions has nothing to
rescale, and the learning rate stays one function of the step. So the same plan runs at 32 tokens and at a million.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

# A number of tokens, or stages (tokens, share of the run).
Contexts = int | tuple[tuple[int, float], ...]

# The report trains at 8K to 64K, then at 256K to 1M; the shares are not published, these are ours.
K3_STAGES = ((8192, 0.85), (65_536, 0.10), (262_144, 0.04), (1_048_576, 0.01))
SHARES_SUM = 1e-6  # how far the shares may be from 1 together


def read_contexts(key: str, value: Any) -> Contexts:
    """A value of TOML as Contexts: a whole number, or a list of [tokens, share]. Raises ValueError naming the key."""
    if not isinstance(value, list):
        return whole(key, value)
    if not value or not all(isinstance(stage, list) and len(stage) == 2 for stage in value):
        raise ValueError(f"{key} = {value!r} is neither a whole number nor a list of stages [tokens, share of the run]")
    stages = tuple((whole(key, context), share) for context, share in value)
    for _, share in stages:
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"{key}: the share {share!r} of a stage must be a number above 0 and at most 1")
    total = sum(share for _, share in stages)
    if abs(total - 1) > SHARES_SUM:
        raise ValueError(f"{key}: the shares of the stages add up to {total:g}, not to 1")
    return tuple((context, float(share)) for context, share in stages)


def whole(key: str, value: Any) -> int:
    """A whole number, which 4e6 is too."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (isinstance(value, int) or value.is_integer())
    ):
        return int(value)
    raise ValueError(f"{key} = {value!r} is not a whole number")


def stages_of(contexts: Contexts) -> tuple[tuple[int, float], ...]:
    """The stages; a plain context is one."""
    return ((contexts, 1.0),) if isinstance(contexts, int) else contexts


def longest(contexts: Contexts) -> int:
    """Tokens of the longest sequence of any stage."""
    return max(context for context, _ in stages_of(contexts))


def first_steps(contexts: Contexts, steps: int) -> list[int]:
    """The step, counted from 0, with which each stage begins in a run of `steps`.

    Raises ValueError for a stage that gets no step.
    """
    stages = stages_of(contexts)
    ends = [round(share * steps) for share in accumulate(share for _, share in stages)]
    starts = [0, *ends[:-1]]
    for i, (start, end) in enumerate(zip(starts, [*ends[:-1], steps], strict=True)):
        if start >= end:
            raise ValueError(
                f"stage {i + 1}, {stages[i][0]} tokens for {stages[i][1]:g} of the run, gets none of its {steps} steps"
            )
    return starts


def context_at(step: int, contexts: Contexts, steps: int) -> int:
    """Tokens of a sequence at a step, counted from 0, of a run of `steps`."""
    starts = first_steps(contexts, steps)
    return stages_of(contexts)[sum(start <= step for start in starts) - 1][0]
