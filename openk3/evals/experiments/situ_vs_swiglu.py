"""SiTU against SwiGLU at raised learning rates: the largest activation, spikes of the gradient, and the loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from openk3.evals.experiments.base import Experiment, Record, markdown
from openk3.evals.experiments.compare import NANO_1M, cell
from openk3.evals.experiments.draw import COLOURS, panels, save
from openk3.evals.experiments.pool import Job, Outcome, provenance, run_all

BUDGET = NANO_1M
RATES = (4e-3, 1.6e-2, 6.4e-2)
ACTIVATIONS = {"SiTU": "situ", "SwiGLU": "swiglu"}
PLACES = {"act_experts": "routed experts", "act_mlp": "dense and shared FFNs"}
SPIKE = 3.0  # a spike is a gradient norm above so many medians of its own run
WARM = 10  # steps left out of the spikes: every run begins with a large gradient


def job(activation: str, rate: float) -> Job:
    sets = (*BUDGET, f"model.activation={ACTIVATIONS[activation]}", f"optim.lr={rate:g}")
    return Job(f"{activation} {rate:g}", "nano", sets, watch="activations")


def run(work: Path, jobs: int) -> Record:
    pairs = [(activation, rate) for rate in RATES for activation in ACTIVATIONS]
    found = run_all([job(*pair) for pair in pairs], jobs, work)
    rows = [row(*pair, found[job(*pair).label]) for pair in pairs]
    return {"rows": rows, "summary": summarise(rows)} | provenance(list(found.values()))


def row(activation: str, rate: float, outcome: Outcome) -> Record:
    lines = outcome.train
    norms = [line["grad_norm"] for line in lines]
    curves = {name: [float(f"{line[name]:.4g}") for line in lines] for name in (*PLACES, "w_max", "loss", "grad_norm")}
    return {
        "activation": activation,
        "lr": rate,
        "bpb": outcome.bpb,
        "diverged": outcome.diverged,
        "steps": len(lines),
        "largest": {name: max((line[name] for line in lines), default=0.0) for name in PLACES},
        "w_max": max((line["w_max"] for line in lines), default=0.0),
        **spikes(norms),
        "curves": curves,
    }


def spikes(norms: Sequence[float], warm: int = WARM, factor: float = SPIKE) -> Record:
    """Gradient norms after the start: median, largest, largest over median, and steps above `factor` medians."""
    kept = list(norms[warm:]) or [0.0]
    middle, largest = statistics.median(kept), max(kept)
    ratio = largest / middle if middle else 0.0
    over = sum(norm > factor * middle for norm in kept)
    return {"grad_median": middle, "grad_largest": largest, "grad_ratio": ratio, "spikes": over}


def summarise(rows: list[Record]) -> Record:
    """By rate: how many times larger SwiGLU's activations grew, which of the two spiked more, and which ended lower."""
    by_rate: Record = {}
    for rate in sorted({r["lr"] for r in rows}):
        situ, swiglu = (next(r for r in rows if r["lr"] == rate and r["activation"] == a) for a in ACTIVATIONS)
        ends = [r["bpb"] for r in (situ, swiglu)]
        by_rate[f"{rate:g}"] = {
            "largest_ratio": {p: swiglu["largest"][p] / situ["largest"][p] for p in PLACES if situ["largest"][p]},
            "spikes": {"SiTU": situ["spikes"], "SwiGLU": swiglu["spikes"]},
            "bpb_difference": None if None in ends else ends[0] - ends[1],
            "diverged": [r["activation"] for r in (situ, swiglu) if r["diverged"]],
        }
    return {"by_rate": by_rate, "sentence": sentence(by_rate)}


def sentence(by_rate: Record) -> str:
    """What came out, in words that follow from the numbers."""
    parts = []
    for rate, found in by_rate.items():
        ratios = " and ".join(f"{x:.1f} in {PLACES[p]}" for p, x in found["largest_ratio"].items())
        text = f"At rate {rate} SwiGLU's largest activation is SiTU's times {ratios}; "
        if found["diverged"]:
            text += f"diverged: {', '.join(found['diverged'])}."
        else:
            text += f"SiTU less SwiGLU is {found['bpb_difference']:+.4f} bits per byte (one seed, a look)."
        parts.append(text)
    return " ".join(parts)


def table(record: Record) -> str:
    header = ["activation", "rate", *(f"largest, {name}" for name in PLACES.values()), "largest weight",
              "gradient, median", "largest", "largest / median", f"steps above {SPIKE:g} medians",
              "bits per byte"]  # fmt: skip
    rows = []
    for r in record["rows"]:
        end = f"diverged after step {r['steps']}" if r["diverged"] else cell(r["bpb"])
        rows.append(
            [r["activation"], f"{r['lr']:g}", *(f"{r['largest'][p]:.1f}" for p in PLACES), f"{r['w_max']:.2f}",
             f"{r['grad_median']:.3f}", f"{r['grad_largest']:.2f}", f"{r['grad_ratio']:.1f}", str(r["spikes"]), end]
        )  # fmt: skip
    return markdown(header, rows) + f"\n{record['summary']['sentence']}\n"


def figure(record: Record, path: Path) -> None:
    fig, axes = panels(3, columns=3, width=3.3)
    drawn = {"act_experts": "largest activation in the routed experts", "grad_norm": "gradient norm", "loss": "loss"}
    styles = dict(zip(RATES, (":", "--", "-"), strict=True))
    for ax, (name, label) in zip(axes, drawn.items(), strict=True):
        for r in record["rows"]:
            colour = COLOURS[list(ACTIVATIONS).index(r["activation"])]
            values, text = r["curves"][name], f"{r['activation']} {r['lr']:g}"
            ax.plot(range(1, len(values) + 1), values, color=colour, ls=styles[r["lr"]], lw=1, label=text)
        ax.set(yscale="log", xlabel="step", title=label)
    axes[0].legend(fontsize=8)
    save(fig, path)


EXPERIMENT = Experiment(
    name="situ-vs-swiglu",
    question="Does SiTU keep activations and gradients smaller than SwiGLU when the learning rate is raised?",
    rows=(53, 58),
    run=run,
    table=table,
    figure=figure,
)
