"""Comparing training runs: seeds and their spread, what a difference has to exceed, size, work, balance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from openk3.config import K3Config
from openk3.evals.experiments.base import Record
from openk3.evals.experiments.pool import Outcome
from openk3.model.audit import audit
from openk3.model.variants import rematch
from openk3.train.recipe import Recipe, load_recipe

# A run of `nano` on 1 M tokens: 245 steps. The one evaluation, after the last step, reads all held-out text.
NANO_1M = ("train.tokens=1000000", "train.eval_every=1000", "train.save_every=50", "train.keep_checkpoints=1",
           "train.sample_prompts=[]")  # fmt: skip
SEEDS = (0, 1, 2)
TAIL = 25  # steps at the end over which balance is averaged
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
# ... Student's t at 97.5 % by degrees of freedom: few seeds are worth less than a normal law says


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; of fewer than two values it is not known. Raises ValueError then."""
    if len(values) < 2:
        raise ValueError("the spread of fewer than two runs is not known")
    return statistics.stdev(values)


def noise_floor(a: Sequence[float], b: Sequence[float]) -> float:
    """What |mean(a) - mean(b)| exceeds by chance in 5 % of cases: Student's t times the error of the difference."""
    error = math.sqrt(spread(a) ** 2 / len(a) + spread(b) ** 2 / len(b))
    return T_975[len(a) + len(b) - 2] * error


def look_bound(seeds: int) -> float:
    """The same for one run against the mean of so many, in units of their spread (assumed to be the run's, too)."""
    return T_975[seeds - 1] * math.sqrt(1 + 1 / seeds)


def training_flops(config: K3Config, tokens: int, context: int) -> float:
    """Of forward and backward: 6 a token and active weight, and the mixing of tokens; a multiply-add counts two.

    MLA: all causal pairs of a full context. KDA: its recurrence, 7 K V a head and token (decay, delta, write, read).
    Optimizer and norms are left out, and pieces shorter than the context attend less.
    """
    pairs = (context + 1) / 2
    mla = 2 * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * pairs
    kda = 7 * config.kda_num_heads * config.kda_head_dim**2
    mixing = sum({"mla": mla, "kda": kda}[kind] for kind in config.layer_kinds)
    return 3 * tokens * (2 * audit(config).active + mixing)


def cost(recipe: Recipe) -> Record:
    """Total and active parameters, and training FLOPs of a run."""
    counted = audit(recipe.model)
    context = recipe.data.context
    assert isinstance(context, int)
    flops = training_flops(recipe.model, recipe.steps * recipe.train.batch_tokens, context)
    return {"total": counted.total, "active": counted.active, "flops": flops}


def rematched(recipe: str, changes: Mapping[str, object]) -> tuple[str, ...]:
    """Overrides that make `changes` to the model and keep its active parameters, by expert inner width alone."""
    base = load_recipe(recipe).model
    width = rematch(base.replace(**changes), audit(base).active).moe_intermediate_size
    sets = [f"model.{name}={str(value).lower()}" for name, value in changes.items()]
    if width != base.moe_intermediate_size:
        sets.append(f"model.moe_intermediate_size={width}")
    return tuple(sets)


def balance(outcome: Outcome) -> Record:
    """Imbalance at the end of a run: mean over the last steps of the mean and of the worst layer, and q."""
    last = outcome.train[-TAIL:]
    return {
        "maxvio": statistics.fmean(statistics.fmean(line["maxvio"]) for line in last),
        "maxvio_worst": statistics.fmean(max(line["maxvio"]) for line in last),
        "dead": sum(sum(line["dead"]) for line in outcome.train),
        "q": last[-1]["q"],
    }


def cell(value: float | None, form: str = ".4f") -> str:
    """A number of a table; a run that diverged has none."""
    return "diverged" if value is None else format(value, form)
