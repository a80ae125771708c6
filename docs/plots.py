"""Draws the figures of the documentation from the package's own functions and from committed records.

    python docs/plots.py                    all figures into docs/figures
    python docs/plots.py situ muon          some of them
    python docs/plots.py --record runs/tour the lines of a run that figures need, into benchmarks/results/cpu

The look is that of a run's report (openk3/train/report_draw.py): text is text, and colours follow the page.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from openk3.config import named
from openk3.model.audit import audit
from openk3.model.sizes import memory_sizes
from openk3.ops import routing
from openk3.ops.mx import fake_quantize
from openk3.ops.situ import situ_glu, swiglu
from openk3.train import report_curves, report_probes
from openk3.train import report_draw as d
from openk3.train.curriculum import K3_STAGES, context_at
from openk3.train.muon import newton_schulz
from openk3.train.qkclip import clip_heads, largest_logit
from openk3.train.report_read import Run, read_run
from openk3.train.report_style import CSS
from openk3.train.schedule import learning_rate

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs/figures"
RECORDS = ROOT / "benchmarks/results/cpu"
TOUR_LINES = RECORDS / "tour_lines.json"
LIGHT = dict(re.findall(r"--(\w+): (#\w+)", CSS.partition("@media")[0]))  # where a page gives no colours


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64))


def record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


# ---- from formulas


def situ() -> str:
    """Report figure 4: the activations with one argument in both branches."""
    x = np.linspace(-20, 120, 701)

    def draw(ax: Axes) -> None:
        ax.plot(x, swiglu(tensor(x), tensor(x)), color=d.SERIES[1], label="SwiGLU")
        ax.plot(x, x / (1 + np.exp(-x)), color=d.SERIES[5], ls="--", label="SiLU alone")
        ax.plot(x, situ_glu(tensor(x), tensor(x)), color=d.SERIES[0], label="SiTU-GLU")
        ax.axhline(100, color=d.MUTED, ls=":", lw=1.2)
        ax.text(-19, 103, "4 x 25 = 100", color=d.MUTED, fontsize=10)
        ax.set(xlabel="x, in both branches", ylim=(-8, 260), ylabel="output")
        ax.legend(ncols=3, **d.ABOVE)

    return d.figure("SiTU-GLU, SwiGLU and SiLU", draw)


def situ_gradient() -> str:
    """d output / d gate at up = 10: SiTU-GLU against SwiGLU, and SwiGLU under a hard clamp."""
    x = np.linspace(-6, 24, 601)

    def slope(f: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        gate = tensor(x).requires_grad_()
        f(gate, torch.full_like(gate, 10.0)).sum().backward()
        assert gate.grad is not None
        return gate.grad.numpy()

    def draw(ax: Axes) -> None:
        ax.plot(x, np.abs(slope(swiglu)), color=d.SERIES[1], label="SwiGLU")
        clamped = np.abs(slope(lambda g, u: swiglu(g, u).clamp(max=40.0)))
        ax.plot(x, np.abs(slope(situ_glu)), color=d.SERIES[0], label="SiTU-GLU")
        clamped = np.maximum(clamped, 1e-6)  # zero falls out of the picture
        ax.plot(x, clamped, color=d.SERIES[2], ls="--", label="SwiGLU clamped at 40")
        ax.set(xlabel="gate, at up = 10", ylabel="|d output / d gate|", yscale="log", ylim=(1e-4, 40))
        ax.legend(ncols=3, **d.ABOVE)

    return d.figure("Gradient of the gate branch", draw)


def decay_map() -> str:
    """Keep factor of one token by logit: report eq. 5 against the predecessor's softplus."""
    z = np.linspace(-8, 8, 401)

    def draw(ax: Axes) -> None:
        for i, a in enumerate((0.5, 1.0, 2.0)):
            ax.plot(z, -5 / (1 + np.exp(-a * z)), color=d.SHADES[2 * i + 1], label=f"bounded, e^A = {a:g}")
        ax.plot(z, -np.logaddexp(0, z), color=d.SERIES[1], ls="--", label="softplus")
        ax.axhline(-5, color=d.MUTED, ls=":", lw=1.2)
        ax.set(xlabel="decay logit plus bias", ylabel="log decay of one token", ylim=(-8.2, 0.3))
        ax.legend(loc="lower left")

    return d.figure("Log decay by logit", draw)


def memory() -> str:
    """Bytes of one sequence of K3 in bf16, by length, and what MLA in all 93 layers would store."""
    sizes, context = memory_sizes(named("k3")), 2.0 ** np.arange(8, 21)
    kda_bytes, row, all_mla = sizes.kda, sizes.token, sizes.token_all_mla

    def draw(ax: Axes) -> None:
        gib = 2.0**30
        ax.plot(context, all_mla * context / gib, color=d.SERIES[1], ls="--", label="93 MLA layers")
        ax.plot(context, (kda_bytes + row * context) / gib, color=d.INK, label="K3")
        ax.plot(context, row * context / gib, color=d.SERIES[2], label="its 24 MLA layers")
        ax.plot(context, np.full_like(context, kda_bytes / gib), color=d.SERIES[0], label="its 69 KDA layers")
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GiB")
        ax.xaxis.set_major_locator(d.LogLocator(base=2, numticks=7))
        ax.xaxis.set_major_formatter(lambda v, _: f"{v / 2**20:g}M" if v >= 2**20 else f"{v / 1024:g}k")
        ax.yaxis.set_major_formatter(d.human)
        ax.minorticks_off()
        ax.legend(loc="upper left")

    return d.figure("Memory of one sequence", draw)


def muon() -> str:
    """Update norm of the loud head over the median head, one head's gradient scaled, whole matrix against per head."""
    generator = torch.Generator().manual_seed(0)
    heads, rows, columns = 12, 64, 768
    grad = torch.randn(heads, rows, columns, generator=generator, dtype=torch.float64)
    scales = np.geomspace(1, 1000, 13)
    ratios: dict[str, list[float]] = {"whole matrix": [], "per head": []}
    for scale in scales:
        scaled = grad.clone()
        scaled[0] *= scale
        whole = newton_schulz(scaled.view(1, heads * rows, columns)).view_as(grad)
        for name, update in (("whole matrix", whole), ("per head", newton_schulz(scaled))):
            norms = torch.linalg.vector_norm(update, dim=(1, 2))
            ratios[name].append(float(norms[0] / norms[1:].median()))

    def draw(ax: Axes) -> None:
        ax.plot(scales, ratios["whole matrix"], "o-", ms=3.5, color=d.SERIES[1], label="whole matrix")
        ax.plot(scales, ratios["per head"], "o-", ms=3.5, color=d.SERIES[0], label="per head")
        ax.set(xscale="log", yscale="log", xlabel="scale of one head's gradient")
        ax.set(ylabel="its update / the median head's", ylim=(0.6, 20))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(d.human)
        ax.set_yticks([1, 2, 5, 10, 20])
        ax.minorticks_off()
        ax.legend(ncols=2, **d.ABOVE)

    return d.figure("One loud head under Muon", draw)


def singular_values() -> str:
    """Singular values of a Gaussian block over the Newton-Schulz steps."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1, 64, 256, generator=generator, dtype=torch.float64)
    block *= torch.logspace(0, -3, 64, dtype=torch.float64)[:, None]

    def draw(ax: Axes) -> None:
        for steps in range(6):
            values = torch.linalg.svdvals(newton_schulz(block, steps=steps))[0]
            ax.plot(range(1, 65), values, color=d.SHADES[steps + 1], label=f"{steps}")
        ax.axhline(1, color=d.MUTED, ls=":", lw=1.2)
        ax.set(yscale="log", ylim=(3e-4, 3), xlabel="singular value, by size", ylabel="value")
        ax.legend(title="steps", ncols=2, loc="lower left")

    return d.figure("Singular values over five steps", draw)


def qk_clip() -> str:
    """Largest logit of eight heads before and after a clip at tau = 100."""
    generator = torch.Generator().manual_seed(0)
    heads, nope, rope, rank, T, tau = 8, 16, 8, 32, 128, 100.0
    loud = torch.logspace(0.2, 1.6, heads, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q_b = (normal(heads, nope + rope, rank) * loud[:, None, None]).flatten(0, 1) * 0.2
    kv_b = normal(heads * (nope + nope), rank) * 0.2
    q_rank, latent, k_pe = normal(T, rank), normal(T, rank), normal(T, rope)

    def largest() -> Tensor:
        q = (q_rank @ q_b.T).unflatten(-1, (heads, -1))
        k = (latent @ kv_b.T).unflatten(-1, (heads, -1))[..., :nope]
        k = torch.cat([k, k_pe[:, None].expand(-1, heads, -1)], dim=-1)
        return largest_logit(q, k, torch.tensor([0, T]), (nope + rope) ** -0.5)

    before = largest()
    clip_heads(q_b, kv_b, (tau / before).clamp(max=1), nope)
    after = largest()

    def draw(ax: Axes) -> None:
        place = np.arange(heads)
        ax.bar(place - 0.2, before, 0.38, color=d.SERIES[1], label="before")
        ax.bar(place + 0.2, after, 0.38, color=d.SERIES[0], label="after")
        ax.axhline(tau, color=d.MUTED, ls=":", lw=1.3)
        ax.set(xlabel="head", ylabel="largest logit", xticks=place)
        ax.legend(ncols=2, **d.ABOVE)

    return d.figure("Largest logit of eight heads", draw)


def balance() -> str:
    """Static skewed scores at K3's sizes, n = 896 and k = 16, for 4,096 tokens: MaxVio by step of three rules."""
    generator = torch.Generator().manual_seed(0)
    n, k, m = 896, 16, 4096
    logits = torch.randn(m, n, generator=generator) + torch.randn(n, generator=generator)
    found: dict[str, list[float]] = {}
    for rule in ("sign step 0.001", "histogram", "exact"):
        bias, values = torch.zeros(n), []
        for _ in range(13):
            routed = routing.route(logits, bias, k)
            loads = routing.loads(routed.ids_TK, n)
            values.append(routing.max_violation(loads))
            if rule == "exact":
                bias = routing.quantile_bias(routed.scores_TE, routed.cutoff_T, k)
            elif rule == "histogram":
                counts = routing.histogram(routed.scores_TE, routed.cutoff_T, bias)
                bias = routing.histogram_bias(counts, bias, k)
            else:
                bias = routing.sign_step(bias, loads)
        found[rule] = values

    def draw(ax: Axes) -> None:
        for (rule, values), color in zip(found.items(), (d.SERIES[1], d.SERIES[2], d.SERIES[0]), strict=True):
            ax.plot(values, "o-", ms=3.5, color=color, label=rule)
        ax.set(yscale="log", xlabel="step", ylabel="largest load / mean load - 1")
        ax.yaxis.set_major_formatter(d.human)
        ax.legend(ncols=3, **d.ABOVE)

    return d.figure("Balance of 896 experts by step", draw)


def schedule() -> str:
    steps = np.arange(700)
    rates = [learning_rate(int(step), 700, peak=4e-3) for step in steps]

    def draw(ax: Axes) -> None:
        ax.plot(steps, np.array(rates) * 1000, color=d.SERIES[0])
        ax.set(xlabel="step", ylabel="learning rate x 1000", ylim=(0, 4.3))

    return d.figure("Learning rate of the tour", draw, 200)


def stages() -> str:
    """Tokens of a sequence over a run with K3's stages, at our shares."""
    steps = np.arange(2000)

    def draw(ax: Axes) -> None:
        ax.plot(steps / 20, [context_at(int(step), K3_STAGES, 2000) for step in steps], color=d.SERIES[0])
        ax.set(yscale="log", xlabel="% of the run", ylabel="tokens of a sequence", ylim=(5e3, 2e6))
        ax.set_yticks([tokens for tokens, _ in K3_STAGES], ["8k", "64k", "256k", "1M"])
        ax.minorticks_off()

    return d.figure("Context stages", draw, 200)


def parts() -> str:
    """Where the parameters of K3 are, and which of them a token touches."""
    k3 = named("k3")
    found = audit(k3, vision=True)
    active = dict(found.parts) | {"input embedding": 0, "vision tower": 0, "projector": 0}
    active["routed experts"] = found.parts["routed experts"] * k3.num_experts_per_token // k3.num_experts
    assert sum(active.values()) == found.active
    names = sorted(found.parts, key=lambda name: -active[name])

    def draw(ax: Axes) -> None:
        y = np.arange(len(names))
        total = sum(found.parts.values())
        ax.barh(y - 0.19, [100 * found.parts[n] / total for n in names], 0.36, color=d.SERIES[5], label="of all")
        ax.barh(y + 0.19, [100 * active[n] / found.active for n in names], 0.36, color=d.SERIES[0],
                label="of those a token touches")  # fmt: skip
        d.row_axis(ax, names)
        ax.set(xlabel="% of parameters", xlim=(0, 100))
        ax.legend(ncols=2, **d.ABOVE)

    return d.figure("Parameters of K3 by part", draw, 330)


def mx_steps() -> str:
    """What MXFP4 makes of a value beside a largest value of 7.5 in its group, by both scale rules."""
    x = np.linspace(0, 7.5, 751)
    groups = np.zeros((len(x), 32))
    groups[:, 0], groups[:, 1] = x, 7.5

    def draw(ax: Axes) -> None:
        ax.plot(x, x, color=d.MUTED, ls=":", lw=1.2, label="exact")
        for rule, color in (("floor", d.SERIES[0]), ("ceil", d.SERIES[1])):
            ax.plot(x, fake_quantize(tensor(groups), "mxfp4", rule)[:, 0], color=color, label=rule)
        ax.set(xlabel="value, largest of its group 7.5", ylabel="as MXFP4")
        ax.legend(ncols=3, **d.ABOVE)

    return d.figure("MXFP4 by scale rule", draw)


def mx_error() -> str:
    """RMS error over RMS of Gaussian groups by the standard deviation, which the power-of-two scale makes periodic."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 32, generator=generator, dtype=torch.float64)
    sizes = np.geomspace(1, 4, 25)

    def error(size: float, *how: str) -> float:
        scaled = x * size
        return float((fake_quantize(scaled, *how) - scaled).square().mean().sqrt() / scaled.square().mean().sqrt())

    def draw(ax: Axes) -> None:
        for how, color in (
            (("mxfp4", "floor"), d.SERIES[0]),
            (("mxfp4", "ceil"), d.SERIES[1]),
            (("mxfp8",), d.SERIES[2]),
        ):
            ax.plot(sizes, [100 * error(size, *how) for size in sizes], color=color, label=" ".join(how))
        ax.set(xscale="log", yscale="log", ylim=(1, 30), xlabel="standard deviation", ylabel="RMS error, %")
        ax.set_xticks([1, 2, 4], ["1", "2", "4"])
        ax.yaxis.set_major_formatter(d.human)
        ax.minorticks_off()
        ax.legend(ncols=3, **d.ABOVE)

    return d.figure("Error of small floats", draw)


# ---- from records


def vocabulary() -> str:
    rows = record("vocabulary.json")["rows"]

    def draw(ax: Axes) -> None:
        ax.plot(
            [row["ranks"] for row in rows], [row["bytes_per_token"] for row in rows], "o-", ms=3.5, color=d.SERIES[0]
        )
        ax.set(xscale="log", xlabel="ranks", ylabel="bytes a token", ylim=(0, 4.5))
        ax.set_xticks([row["ranks"] for row in rows], [f"{row['ranks']:,}" for row in rows])
        ax.minorticks_off()

    return d.figure("Bytes a token by size of the vocabulary", draw, 220)


def kda_forms() -> str:
    rows = record("kda_forms.json")["rows"]
    lengths = [row["T"] for row in rows]

    def draw(ax: Axes) -> None:
        for i, name in enumerate(("recurrence", "chunks", "step")):
            color = d.SERIES[(1, 0, 2)[i]]
            ax.plot(lengths, [row[f"{name}_ms"] for row in rows], "o-", ms=3.5, color=color, label=name)
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
        ax.xaxis.set_major_locator(d.LogLocator(base=2, numticks=8))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(d.human)
        ax.minorticks_off()
        ax.legend(ncols=3, **d.ABOVE)

    return d.figure("Time of the three forms", draw)


def tour_run() -> Run:
    """The record of the tour as the run that its report was made of."""
    content = json.loads(TOUR_LINES.read_text(encoding="utf-8"))
    return Run("tour", content["config"], "", content["records"], [], [])


def panel(draw: Callable[[Run], d.Panel]) -> Callable[[], str]:
    def drawn() -> str:
        svg = draw(tour_run()).svg
        assert svg is not None
        return svg

    return drawn


def write_record(run_folder: Path) -> None:
    """The lines that figures need: every probe, the balance of every step."""
    run = read_run(run_folder)
    train = [{"step": x["step"], "maxvio": [round(v, 4) for v in x["maxvio"]], "q": x["q"]} for x in run.of("train")]
    content = {
        "command": "openk3 tour, then python docs/plots.py --record runs/tour; see tour.json for the machine",
        "config": {"data": {"context": run.config["data"]["context"]}},
        "records": {"probe": run.of("probe"), "train": train},
    }
    TOUR_LINES.write_text(json.dumps(content) + "\n", encoding="utf-8")


DRAWN: dict[str, Callable[[], str]] = {
    "situ": situ,
    "situ_gradient": situ_gradient,
    "decay_map": decay_map,
    "memory": memory,
    "muon": muon,
    "singular_values": singular_values,
    "qk_clip": qk_clip,
    "balance": balance,
    "schedule": schedule,
    "stages": stages,
    "parts": parts,
    "mx_steps": mx_steps,
    "mx_error": mx_error,
    "vocabulary": vocabulary,
    "kda_forms": kda_forms,
    "tour_attnres": panel(report_probes.attnres_map),
    "tour_half_lives": panel(report_probes.half_lives),
    "tour_balance": panel(report_curves.max_violation),
}


def standalone(svg: str) -> str:
    """The element as a file: what stands for the page's colours falls back to those of a light page."""
    svg = re.sub(r"var\(--(\w+)\)", lambda found: f"var(--{found[1]}, {LIGHT[found[1]]})", svg)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="figure", help=", ".join(DRAWN))
    parser.add_argument("--record", type=Path, metavar="RUN", help="write the record of the tour and stop")
    options = parser.parse_args()
    if options.record:
        write_record(options.record)
        return
    FIGURES.mkdir(exist_ok=True)
    for name in options.names or DRAWN:
        (FIGURES / f"{name}.svg").write_text(standalone(DRAWN[name]()), encoding="utf-8")


if __name__ == "__main__":
    main()
