"""One mechanism of K3 at a time put back to what it replaced, at the same active parameters: one seed each, a look."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from openk3.evals.experiments.base import Experiment, Record, markdown
from openk3.evals.experiments.compare import (
    NANO_1M,
    SEEDS,
    balance,
    cell,
    cost,
    look_bound,
    rematched,
    spread,
)
from openk3.evals.experiments.draw import COLOURS, MUTED, panels, save
from openk3.evals.experiments.pool import Job, Outcome, provenance, run_all

BUDGET = NANO_1M
BASE = "nano"
BASELINE = "K3"


class Swap(NamedTuple):
    """What stands in for a mechanism: fields of the model, and overrides of other sections."""

    label: str
    model: dict[str, object]
    others: tuple[str, ...] = ()


SWAPS = (
    Swap("plain residual", {"residual": "plain"}),
    Swap("AttnRes over every sub-layer", {"residual": "full"}),
    Swap("SwiGLU", {"activation": "swiglu"}),
    Swap("experts at full width", {"latent_moe": False}),
    Swap("no norm in the latent MoE", {"latent_norm": False}),
    Swap("no output gate in MLA", {"mla_gate": False}),
    Swap("RoPE in MLA", {"mla_position": "rope"}),
    Swap("all MLA, no positions", {"attention": "mla"}),
    Swap("all MLA, RoPE", {"attention": "mla", "mla_position": "rope"}),
    Swap("all KDA", {"attention": "kda"}),
    Swap("unbounded decay", {"decay": "softplus"}),
    Swap("low-rank output gate in KDA", {"kda_gate": "low_rank"}),
    Swap("sign balancing", {}, ("balance.rule=sign",)),
    Swap("whole-matrix Muon", {}, ("optim.optimizer=muon",)),
    Swap("AdamW", {}, ("optim.optimizer=adamw",)),
)


def baseline(seed: int) -> Job:
    return Job(f"{BASELINE} seed {seed}", BASE, (*BUDGET, f"train.seed={seed}"))


def job(swap: Swap) -> Job:
    return Job(swap.label, BASE, (*BUDGET, *rematched(BASE, swap.model), *swap.others))


def run(work: Path, jobs: int) -> Record:
    found = run_all([*map(baseline, SEEDS), *map(job, SWAPS)], jobs, work)
    rows = [row(BASELINE, found[baseline(seed).label]) for seed in SEEDS]
    rows += [row(swap.label, found[swap.label]) for swap in SWAPS]
    return summarise(rows) | provenance(list(found.values()))


def row(label: str, outcome: Outcome) -> Record:
    recipe = outcome.job.resolved()
    head = {"label": label, "seed": recipe.train.seed, "bpb": outcome.bpb, "diverged": outcome.diverged}
    return head | cost(recipe) | {"width": recipe.model.moe_intermediate_size} | balance(outcome)


def summarise(rows: list[Record]) -> Record:
    """Each row with its difference to the baseline's mean, also in units of the baseline's spread."""
    base = [r["bpb"] for r in rows if r["label"] == BASELINE]
    mean, unit, bound = statistics.fmean(base), spread(base), look_bound(len(base))
    full = []
    for r in rows:
        difference = None if r["bpb"] is None else r["bpb"] - mean
        spreads = None if difference is None else difference / unit
        clear = spreads is None or abs(spreads) > bound
        full.append(r | {"difference": difference, "spreads": spreads, "clear": clear})
    worse = [r["label"] for r in full if r["clear"] and (r["difference"] is None or r["difference"] > 0)]
    better = [r["label"] for r in full if r["clear"] and r["difference"] is not None and r["difference"] < 0]
    summary = {"mean": mean, "spread": unit, "bound": bound, "worse": worse, "better": better}
    return {"rows": full, "summary": summary | {"sentence": sentence(summary)}}


def sentence(summary: Record) -> str:
    """What came out, in words that follow from the numbers."""
    text = (
        f"K3: {summary['mean']:.4f} +- {summary['spread']:.4f} bits per byte over {len(SEEDS)} seeds. By chance one "
        f"run in twenty lies more than {summary['bound']:.1f} spreads from that mean."
    )
    for word in ("worse", "better"):
        text += f" Beyond it, {word}: {', '.join(summary[word]) or 'none'}."
    return text


def table(record: Record) -> str:
    header = ["run", "bits per byte", "difference", "in spreads", "expert width", "active", "total",
              "training FLOPs", "MaxVio", "q"]  # fmt: skip
    rows = []
    for r in record["rows"]:
        name = f"{r['label']}, seed {r['seed']}" if r["label"] == BASELINE else r["label"]
        rows.append(
            [name, cell(r["bpb"]), cell(r["difference"], "+.4f"), cell(r["spreads"], "+.1f"), str(r["width"]),
             f"{r['active']:,}", f"{r['total']:,}", f"{r['flops']:.2e}", f"{r['maxvio']:.2f}", f"{r['q']:.0f}"]
        )  # fmt: skip
    return markdown(header, rows) + f"\n{record['summary']['sentence']}\n"


def figure(record: Record, path: Path) -> None:
    swaps = [r for r in record["rows"] if r["label"] != BASELINE and r["difference"] is not None]
    swaps.sort(key=lambda r: -r["difference"])
    fig, (ax,) = panels(1, width=6.4, height=0.9 + 0.27 * len(swaps))
    bound = record["summary"]["bound"] * record["summary"]["spread"]
    ax.axvspan(-bound, bound, color=MUTED, alpha=0.15, lw=0)
    ax.axvline(0, color=MUTED, lw=0.8)
    for i, r in enumerate(swaps):
        ax.plot([0, r["difference"]], [i, i], color=COLOURS[0 if r["difference"] > 0 else 1], lw=1)
        ax.plot(r["difference"], i, "o", color=COLOURS[0 if r["difference"] > 0 else 1], ms=5)
    ax.set_yticks(range(len(swaps)), [r["label"] for r in swaps])
    ax.set_ylim(-0.6, len(swaps) - 0.4)
    ax.grid(False, axis="y")
    ax.set_xlabel("held-out bits per byte, less K3's mean (grey: chance)")
    save(fig, path)


EXPERIMENT = Experiment(
    name="swaps",
    question="What does each mechanism of K3 do for the loss when it alone is swapped for what it replaced?",
    rows=(26, 32, 34, 44, 50),
    run=run,
    table=table,
    figure=figure,
)
