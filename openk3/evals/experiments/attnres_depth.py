"""Block Attention Residuals against the plain residual in a thin net of 24 layers: what reaches which depth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from openk3.evals.experiments.base import Experiment, Record, markdown
from openk3.evals.experiments.compare import SEEDS, cell, cost, noise_floor, spread
from openk3.evals.experiments.draw import COLOURS, panels, save
from openk3.evals.experiments.pool import Job, Outcome, provenance, run_all

LAYERS = 24
THIN = (  # nano at half its widths; 8 blocks, as K3 has
    f"model.num_hidden_layers={LAYERS}", "model.attn_res_block_size=3", "model.hidden_size=64",
    "model.kda_num_heads=2", "model.num_attention_heads=2", "model.q_lora_rank=32",
    "model.routed_expert_hidden_size=32", "model.moe_intermediate_size=32", "model.intermediate_size=256",
)  # fmt: skip
BUDGET = ("train.tokens=500000", "train.eval_every=1000", "train.save_every=50", "train.keep_checkpoints=1",
          "train.sample_prompts=[]")  # fmt: skip
RESIDUALS = {"block AttnRes": "block", "plain residual": "plain"}


def job(residual: str, seed: int) -> Job:
    sets = (*THIN, *BUDGET, f"model.residual={RESIDUALS[residual]}", f"train.seed={seed}")
    return Job(f"{residual} seed {seed}", "nano", sets, watch="depth")


def run(work: Path, jobs: int) -> Record:
    pairs = [(residual, seed) for residual in RESIDUALS for seed in SEEDS]
    found = run_all([job(*pair) for pair in pairs], jobs, work)
    rows = [row(*pair, found[job(*pair).label]) for pair in pairs]
    return {"rows": rows, "summary": summarise(rows)} | provenance(list(found.values()))


def row(residual: str, seed: int, outcome: Outcome) -> Record:
    seen = [line for line in outcome.train if "out_grad" in line]
    probe = outcome.records["probe"][-1]["attnres"] if seed == SEEDS[0] and not outcome.diverged else []
    return {
        "residual": residual,
        "seed": seed,
        "bpb": outcome.bpb,
        "diverged": outcome.diverged,
        **cost(outcome.job.resolved()),
        "grad": profile([line["out_grad"] for line in seen]),
        "rms": profile([line["out_rms"] for line in seen]),
        "attnres": [{"site": s["site"], "weights": [round(w, 4) for w in s["weights"]]} for s in probe],
    }


def profile(lines: Sequence[Sequence[float]]) -> Record:
    """Values by depth at the first step, half way, and at the end (the mean of the last quarter)."""
    tail = lines[-max(1, len(lines) // 4) :]
    last = [statistics.fmean(values) for values in zip(*tail, strict=True)]
    return {"first": list(lines[0]), "middle": list(lines[len(lines) // 2]), "last": last}


def unevenness(values: Sequence[float]) -> float:
    """Largest over smallest of a profile: 1 where all depths are alike."""
    return max(values) / min(values)


def first_block_share(sites: Sequence[Record], from_layer: int) -> float:
    """Mean weight that the sites from a layer on give to the first source, the embedding."""
    late = [s["weights"][0] for s in sites if layer_of(s["site"]) >= from_layer]
    return statistics.fmean(late)


def layer_of(site: str) -> int:
    """The layer of a site's name; the output comes after all."""
    return LAYERS if site == "output" else int(site.split(".")[1])


def summarise(rows: list[Record]) -> Record:
    """By residual: loss, and how uneven gradients and outputs are over the depth at the end; the gap; the map."""
    summary: Record = {}
    for residual in RESIDUALS:
        own = [r for r in rows if r["residual"] == residual]
        ends = [r["bpb"] for r in own if r["bpb"] is not None]
        summary[residual] = {
            "bpb": ends,
            "mean": statistics.fmean(ends),
            "spread": spread(ends),
            "grad_unevenness": statistics.fmean(unevenness(r["grad"]["last"]) for r in own),
            "rms_unevenness": statistics.fmean(unevenness(r["rms"]["last"]) for r in own),
        }
    block, plain = (summary[residual] for residual in RESIDUALS)
    summary["gap"] = block["mean"] - plain["mean"]
    summary["noise_floor"] = noise_floor(block["bpb"], plain["bpb"])
    sites = next(r["attnres"] for r in rows if r["attnres"])
    summary["embedding_share_late"] = first_block_share(sites, LAYERS // 2)
    return summary | {"sentence": sentence(summary)}


def sentence(summary: Record) -> str:
    """What came out, in words that follow from the numbers."""
    block, plain = (summary[residual] for residual in RESIDUALS)
    word = "exceeds" if abs(summary["gap"]) > summary["noise_floor"] else "does not exceed"
    return (
        f"Block AttnRes {block['mean']:.4f} +- {block['spread']:.4f}, plain {plain['mean']:.4f} +- "
        f"{plain['spread']:.4f} bits per byte; the gap of {summary['gap']:+.4f} {word} the noise floor of "
        f"{summary['noise_floor']:.4f}. From the sub-layer with the least to that with the most, gradients differ by a "
        f"factor of {block['grad_unevenness']:.1f} (plain: {plain['grad_unevenness']:.1f}) and outputs by "
        f"{block['rms_unevenness']:.1f} (plain: {plain['rms_unevenness']:.1f}). Sites in the upper half give the "
        f"embedding {summary['embedding_share_late']:.0%} of their weight on average."
    )


def table(record: Record) -> str:
    header = ["residual", "seed", "bits per byte", "gradient, most / least", "output RMS, most / least", "active",
              "total", "training FLOPs"]  # fmt: skip
    rows = [
        [r["residual"], str(r["seed"]), cell(r["bpb"]), f"{unevenness(r['grad']['last']):.1f}",
         f"{unevenness(r['rms']['last']):.1f}", f"{r['active']:,}", f"{r['total']:,}", f"{r['flops']:.2e}"]
        for r in record["rows"]
    ]  # fmt: skip
    return markdown(header, rows) + f"\n{record['summary']['sentence']}\n"


def figure(record: Record, path: Path) -> None:
    fig, (gradients, outputs, weights) = panels(3, columns=3, width=3.4)
    for ax, name, title in (
        (gradients, "grad", "gradient norm at each output"),
        (outputs, "rms", "RMS of each output"),
    ):
        for colour, residual in zip(COLOURS, RESIDUALS, strict=False):
            r = next(r for r in record["rows"] if r["residual"] == residual and r["seed"] == SEEDS[0])
            for when, style in (("first", ":"), ("middle", "--"), ("last", "-")):
                x = [i / 2 for i in range(len(r[name][when]))]
                label = residual if when == "last" else None
                ax.plot(x, r[name][when], color=colour, ls=style, lw=1, label=label)
        ax.set(yscale="log", xlabel="layer (dotted: first step, dashed: half way)", title=title)
    gradients.legend()
    sites = next(r["attnres"] for r in record["rows"] if r["attnres"])
    most = max(len(s["weights"]) for s in sites)
    grid = [[*s["weights"], *[float("nan")] * (most - len(s["weights"]))] for s in sites]
    image = weights.imshow(grid, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest", origin="lower")
    weights.grid(False)
    weights.set(xlabel="source: embedding, blocks, partial sum", ylabel="site, from the first to the output")
    weights.set_title("AttnRes weights at the end")
    fig.colorbar(image, ax=weights)
    save(fig, path)


EXPERIMENT = Experiment(
    name="attnres-depth",
    question="What do Attention Residuals change over the depth of a thin net of 24 layers, and what is it worth?",
    rows=(43, 44),
    run=run,
    table=table,
    figure=figure,
)
