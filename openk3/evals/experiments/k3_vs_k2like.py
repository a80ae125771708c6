"""K3 against what it replaced, at the same active parameters: a small search of the rate for each, then three seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from openk3.errors import Failure
from openk3.evals.experiments.base import Experiment, Record, markdown
from openk3.evals.experiments.compare import NANO_1M, SEEDS, balance, cell, cost, noise_floor, spread
from openk3.evals.experiments.draw import COLOURS, panels, save, smooth
from openk3.evals.experiments.pool import Job, Outcome, provenance, run_all

BUDGET = NANO_1M
RATES = (2e-3, 4e-3, 8e-3)
RECIPES = {"K3": "nano", "K2-like": "k2like"}


def job(side: str, rate: float, seed: int) -> Job:
    return Job(f"{side} {rate:g} seed {seed}", RECIPES[side], (*BUDGET, f"optim.lr={rate:g}", f"train.seed={seed}"))


def run(work: Path, jobs: int) -> Record:
    sweep = run_all([job(side, rate, SEEDS[0]) for side in RECIPES for rate in RATES], jobs, work)
    best = {side: best_rate({rate: sweep[job(side, rate, SEEDS[0]).label].bpb for rate in RATES}) for side in RECIPES}
    seeds = run_all([job(side, best[side], seed) for side in RECIPES for seed in SEEDS], jobs, work)
    found = sweep | seeds
    rows = [
        row(side, rate, seed, found[job(side, rate, seed).label])
        for side in RECIPES
        for rate, seed in [*((rate, SEEDS[0]) for rate in RATES), *((best[side], seed) for seed in SEEDS[1:])]
    ]
    return {"rows": rows, "summary": summarise(rows, best)} | provenance(list(found.values()))


def best_rate(bpb: Mapping[float, float | None]) -> float:
    """The rate that ended lowest. Raises Failure if all diverged."""
    ended = {rate: value for rate, value in bpb.items() if value is not None}
    if not ended:
        raise Failure("no rate of the search came to its end")
    return min(ended, key=ended.__getitem__)


def row(side: str, rate: float, seed: int, outcome: Outcome) -> Record:
    losses = [line["loss"] for line in outcome.train]
    size = cost(outcome.job.resolved())
    head = {"side": side, "lr": rate, "seed": seed, "bpb": outcome.bpb, "diverged": outcome.diverged}
    return head | size | balance(outcome) | {"losses": [round(loss, 4) for loss in losses]}


def summarise(rows: list[Record], best: Mapping[str, float]) -> Record:
    """Mean and spread of each side at its best rate, the gap (K3 less K2-like), and whether chance explains it."""
    ends = {
        side: [r["bpb"] for r in rows if r["side"] == side and r["lr"] == best[side] and r["bpb"] is not None]
        for side in best
    }
    summary: Record = {
        side: {
            "lr": best[side],
            "lr_at_edge": best[side] in (min(RATES), max(RATES)),
            "bpb": ends[side],
            "mean": statistics.fmean(ends[side]),
            "spread": spread(ends[side]),
        }
        for side in best
    }
    k3, k2 = ends["K3"], ends["K2-like"]
    gap, floor = statistics.fmean(k3) - statistics.fmean(k2), noise_floor(k3, k2)
    verdict = "within noise" if abs(gap) <= floor else ("K3 lower" if gap < 0 else "K2-like lower")
    return summary | {"gap": gap, "noise_floor": floor, "verdict": verdict, "sentence": sentence(summary, gap, floor)}


def sentence(summary: Record, gap: float, floor: float) -> str:
    """What came out, in words that follow from the numbers."""
    parts = [f"{side} {s['mean']:.4f} +- {s['spread']:.4f} bits per byte at rate {s['lr']:g}"
             for side, s in summary.items()]  # fmt: skip
    word = "exceeds" if abs(gap) > floor else "does not exceed"
    text = f"{'; '.join(parts)}. The gap of {gap:+.4f} {word} the noise floor of {floor:.4f}."
    for side, s in summary.items():
        if s["lr_at_edge"]:
            text += f" The best rate of {side} lies at the edge of the search: its true best may be better."
    return text


def table(record: Record) -> str:
    header = ["model", "rate", "seed", "bits per byte", "active", "total", "training FLOPs", "MaxVio at the end"]
    rows = [
        [r["side"], f"{r['lr']:g}", str(r["seed"]), cell(r["bpb"]), f"{r['active']:,}", f"{r['total']:,}",
         f"{r['flops']:.2e}", f"{r['maxvio']:.2f}"]
        for r in record["rows"]
    ]  # fmt: skip
    return markdown(header, rows) + f"\n{record['summary']['sentence']}\n"


def figure(record: Record, path: Path) -> None:
    fig, (search, curves) = panels(2)
    summary = record["summary"]
    for colour, side in zip(COLOURS, RECIPES, strict=False):
        first = [r for r in record["rows"] if r["side"] == side and r["seed"] == SEEDS[0] and r["bpb"] is not None]
        search.plot([r["lr"] for r in first], [r["bpb"] for r in first], "-o", color=colour, ms=4, label=side)
        ends = summary[side]["bpb"]
        search.plot([summary[side]["lr"]] * len(ends), ends, "_", color=colour, ms=11)
        for r in record["rows"]:
            if r["side"] == side and r["lr"] == summary[side]["lr"]:
                label = side if r["seed"] == SEEDS[0] else None
                curves.plot(range(1, len(r["losses"]) + 1), smooth(r["losses"], 10), color=colour, lw=1, label=label)
    search.set_xscale("log")
    search.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    search.minorticks_off()
    search.set(xlabel="learning rate", ylabel="held-out bits per byte", title="Search, and seeds at the best rate")
    curves.set(xlabel="step", ylabel="training loss, mean of 10", title="At the best rate, three seeds", yscale="log")
    curves.yaxis.set_minor_formatter(lambda x, _: f"{x:g}")
    search.legend()
    curves.legend()
    save(fig, path)


EXPERIMENT = Experiment(
    name="k3-vs-k2like",
    question="Does K3 learn more from the same tokens than what it replaced, at the same active parameters?",
    rows=(),
    run=run,
    table=table,
    figure=figure,
)
