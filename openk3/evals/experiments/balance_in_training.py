"""Quantile Balancing against the sign step and against nothing, in the same training run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from openk3.evals.experiments.base import Experiment, Record, markdown
from openk3.evals.experiments.compare import NANO_1M, SEEDS, cell
from openk3.evals.experiments.draw import COLOURS, MUTED, panels, save, smooth
from openk3.evals.experiments.pool import Job, Outcome, provenance, run_all

BUDGET = NANO_1M
RULES = {"quantile": (), "sign": ("balance.rule=sign",), "none": ("balance.rule=none",)}
GOAL = 0.5  # MaxVio to be below
BY_STEP = 5
SETTLED = 10  # steps in a row below the goal


def job(rule: str) -> Job:
    return Job(f"{rule} balancing", "nano", (*BUDGET, *RULES[rule], f"train.seed={SEEDS[0]}"))


def run(work: Path, jobs: int) -> Record:
    found = run_all([job(rule) for rule in RULES], jobs, work)
    rows = [row(rule, found[job(rule).label]) for rule in RULES]
    return {"rows": rows, "summary": summarise(rows)} | provenance(list(found.values()))


def row(rule: str, outcome: Outcome) -> Record:
    """MaxVio by step and layer, dead experts by step, q, and what the run was worth."""
    return {
        "rule": rule,
        "bpb": outcome.bpb,
        "diverged": outcome.diverged,
        "q": outcome.train[-1]["q"],
        "maxvio": [[round(x, 4) for x in line["maxvio"]] for line in outcome.train],
        "dead": [sum(line["dead"]) for line in outcome.train],
    }


def settled(values: Sequence[float], goal: float = GOAL, steps: int = SETTLED) -> int | None:
    """The first step, from 1, that begins so many steps in a row below the goal; None if there is none."""
    for i in range(len(values) - steps + 1):
        if all(value < goal for value in values[i : i + steps]):
            return i + 1
    return None


def layer_means(row: Record) -> list[float]:
    return [statistics.fmean(layers) for layers in row["maxvio"]]


def summarise(rows: list[Record]) -> Record:
    """By rule: the mean over layers at chosen times and when it settled; and how often quantile is below sign."""
    summary: Record = {}
    for r in rows:
        means = layer_means(r)
        summary[r["rule"]] = {
            "at_goal_step": means[min(BY_STEP, len(means)) - 1],
            "settled": settled(means),
            "median_last_half": statistics.median(means[len(means) // 2 :]),
            "worst_layer_last_half": max(max(layers) for layers in r["maxvio"][len(means) // 2 :]),
            "dead_expert_steps": sum(r["dead"]),
        }
    by_rule = {r["rule"]: layer_means(r) for r in rows}
    pairs = list(zip(by_rule["quantile"][1:], by_rule["sign"][1:], strict=False))  # step 1 has the same bias, 0
    above = [i + 2 for i, (quantile, sign) in enumerate(pairs) if quantile >= sign]
    summary["steps_compared"], summary["steps_not_below"] = len(pairs), above
    summary["noise"] = 3 / rows[0]["q"] ** 0.5
    return summary | {"sentence": sentence(summary)}


def sentence(summary: Record) -> str:
    """What came out, in words that follow from the numbers."""
    below = summary["steps_compared"] - len(summary["steps_not_below"])
    quantile = summary["quantile"]
    reached = "is" if quantile["at_goal_step"] < GOAL else "is not"
    return (
        f"Mean MaxVio over the layers is lower under the quantile rule than under the sign rule at {below} of "
        f"{summary['steps_compared']} steps. At step {BY_STEP} it is {quantile['at_goal_step']:.2f}, which {reached} "
        f"below the goal of {GOAL}. Sampling noise alone makes about {summary['noise']:.2f} at this q."
    )


def table(record: Record) -> str:
    header = ["rule", f"MaxVio at step {BY_STEP}", f"first {SETTLED} steps below {GOAL}", "median, last half",
              "worst layer and step, last half", "experts without a token, summed", "bits per byte", "q"]  # fmt: skip
    rows = []
    for r in record["rows"]:
        s = record["summary"][r["rule"]]
        rows.append(
            [r["rule"], f"{s['at_goal_step']:.2f}", "never" if s["settled"] is None else f"from {s['settled']}",
             f"{s['median_last_half']:.2f}", f"{s['worst_layer_last_half']:.2f}", f"{s['dead_expert_steps']:,}",
             cell(r["bpb"]), f"{r['q']:.0f}"]
        )  # fmt: skip
    return markdown(header, rows) + f"\n{record['summary']['sentence']}\n"


def figure(record: Record, path: Path) -> None:
    layers = len(record["rows"][0]["maxvio"][0])
    fig, axes = panels(layers, height=2.5)
    for layer, ax in enumerate(axes):
        for colour, r in zip(COLOURS, record["rows"], strict=False):
            values = [step[layer] for step in r["maxvio"]]
            steps = range(1, len(values) + 1)
            ax.plot(steps, values, color=colour, lw=0.5, alpha=0.35)
            ax.plot(steps, smooth(values, 5), color=colour, label=r["rule"])
        ax.axhline(record["summary"]["noise"], color=MUTED, lw=0.8, ls=":")
        ax.set(xscale="log", yscale="log", title=f"MoE layer {layer + 1} of {layers}", ylabel="MaxVio")
        ax.set_xlabel("step (dotted: sampling noise at this q)")
    axes[0].legend()
    save(fig, path)


EXPERIMENT = Experiment(
    name="balance-in-training",
    question="Does Quantile Balancing keep experts more evenly busy than the sign step, step by step, at what loss?",
    rows=(67, 74),
    run=run,
    table=table,
    figure=figure,
)
