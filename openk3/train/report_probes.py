"""The report's figures of what the K3 mechanisms learned, from the probes made at every evaluation."""

from __future__ import annotations

import math
import re

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import MultipleLocator

from openk3.train import report_draw as d
from openk3.train.report_draw import Panel, missing
from openk3.train.report_read import Record, Run, number

Sites = list[tuple[str, list[float]]]
MARKS = "os^Dv*"


def attnres_map(run: Run) -> Panel:
    """Depth weights at the last probe: site x source."""
    title = "Where each sub-layer reads"
    probes = _sites(run)
    if not probes:
        return missing(title, _NO_ATTNRES)
    step, rows = probes[-1]
    name, weights = rows[-1]
    best = sorted(range(len(weights)), key=lambda i: -weights[i])[:2]
    text = (
        f"Step {step:,}: percent of each read, mean over tokens. A dot marks the block still being summed. The last "
        f"read ({_site(name)}) takes {' and '.join(_share(i, weights) for i in best)}."
    )
    return Panel(title, _heat(title, rows), text)


def attnres_start(run: Run) -> Panel:
    """Depth weights at the first probe."""
    title = "At the first probe"
    probes = _sites(run)
    if len(probes) < 2:
        return missing(title, "it takes two probes to compare" if probes else _NO_ATTNRES)
    step, rows = probes[0]
    far = max(abs(w - 1 / len(weights)) for _, weights in rows for w in weights)
    text = f"Step {step:,}. "
    if far < 0.01:
        text += "Every query starts at zero, so every read is the plain mean of its sources."
    else:
        text += (
            f"Queries start at zero, where a read is the plain mean of its sources; here a weight is already up to "
            f"{100 * far:.0f} points away from it."
        )
    return Panel(title, _heat(title, rows), text)


_NO_ATTNRES = "no probe of Attention Residuals (none was made yet, or the residual is plain)"


def _share(i: int, weights: list[float]) -> str:
    return f"{100 * weights[i]:.0f}% from " + ("the embedding" if i == 0 else f"block {i}")


def _sites(run: Run) -> list[tuple[int, Sites]]:
    """(step, [(site, weights)]) of every probe that has sites."""
    found = []
    for probe in run.of("probe"):
        rows = [(str(s["site"]), [number(w) for w in s["weights"]]) for s in probe.get("attnres") or []]
        rows = [(site, weights) for site, weights in rows if weights]
        if rows:
            found.append((probe["step"], rows))
    return found


def _site(name: str) -> str:
    return re.sub(r"^(model\.)?(layers\.)?", "", name).replace(".", " ").replace("_", " ")


def _heat(title: str, rows: Sites) -> str:
    """Source i of a site is block i: the last one is the sum under way, which will be that block."""
    wide = max(len(weights) for _, weights in rows)
    write = wide <= 10 and len(rows) <= 40

    def draw(ax: Axes) -> None:
        for y, (_, weights) in enumerate(rows):
            cells = [Rectangle((x - 0.48, y - 0.44), 0.96, 0.88) for x in range(len(weights))]
            strength = [0.06 + 0.94 * min(max(w, 0.0), 1.0) if math.isfinite(w) else 0.0 for w in weights]
            ax.add_collection(PatchCollection(cells, facecolor=d.HEAT, alpha=strength, edgecolor="none"))
            inks = [d.PAPER if w > 0.72 else d.INK for w in weights]
            for x, w in enumerate(weights) if write else ():
                shown = f"{100 * w:.0f}" if math.isfinite(w) else "NaN"
                ax.text(x, y, shown, ha="center", va="center_baseline", fontsize=10, color=inks[x])
            if len(weights) > 1:
                ax.plot(len(weights) - 1 + 0.36, y, ".", color=inks[-1], ms=4, clip_on=False)
        d.row_axis(ax, [_site(name) for name, _ in rows])
        ax.grid(False)
        ax.set_xlim(-0.6, wide - 0.4)
        ax.set_xlabel("source: block (0 is the embedding)")
        ax.set_ylabel("layer and sub-layer")
        ax.xaxis.set_major_locator(MultipleLocator(-(-wide // 12)))
        ax.tick_params(axis="x", length=0)

    return d.figure(title, draw, d.row_height(len(rows), 20))


def half_lives(run: Run) -> Panel:
    """Decay half-lives at the last probe: one row a KDA head, five quantiles on a log axis."""
    title = "Decay half-lives by head"
    probes = _kda_probes(run)
    if not probes:
        return missing(title, _NO_KDA)
    (first, start), (last, now) = probes[0], probes[-1]
    values = np.array(list(now.values()))
    context = number(run.fact("context"))

    def draw(ax: Axes) -> None:
        q, y = _positive(values), np.arange(len(values))
        thick = min(6.0, 300 / len(q))
        ax.hlines(y, q[:, 0], q[:, 4], color=d.SERIES[0], lw=max(0.4, thick / 5), alpha=0.7)
        ax.hlines(y, q[:, 1], q[:, 3], color=d.SERIES[0], lw=thick, alpha=0.5)
        size = max(1.5, min(4.0, 200 / len(q)))
        if len(probes) > 1:
            then = _positive(np.array([start.get(head, [math.nan] * 5) for head in now]))[:, 2]
            ax.plot(then, y, "o", mfc="none", mec=d.SERIES[1], ms=1.2 * size, mew=0.9, label=f"median, step {first:,}")
        ax.plot(q[:, 2], y, "o", color=d.INK, ms=size, label=f"median, step {last:,}")
        if np.nanmin(q) <= context <= 3 * np.nanmax(q):
            ax.axvline(context, color=d.MUTED, ls=":", lw=1.3, label="context")
        few = len(now) <= 48
        labels = [f"layer {layer}" + ", head 0" * few if h == 0 else f"{h}" * few for layer, h in now]
        d.row_axis(ax, labels)
        d.value_axis(ax, "half-life in tokens", q, "x")
        ax.legend(ncols=3, **d.ABOVE)

    text = (
        "After its half-life a channel still holds half of what was written. The thick bar is the middle half of a "
        "head's channels, the thin one all of them: a long row keeps fast and slow memory side by side, which one "
        "decay a head could not."
    )
    return Panel(title, d.figure(title, draw, d.row_height(len(values)) + 12), text)


def fading(run: Run) -> Panel:
    """The same quantiles over training, each the median over all heads."""
    title = "Half-lives through training"
    probes = _kda_probes(run)
    if len(probes) < 2:
        return missing(title, "it takes two probes to compare" if probes else _NO_KDA)
    steps = np.array([step for step, _ in probes], dtype=np.float64)
    raw = np.array([np.median(_positive(np.array(list(heads.values()))), axis=0) for _, heads in probes])
    context = number(run.fact("context"))

    def draw(ax: Axes) -> None:
        d.count_axis(ax, "step", steps)
        ax.fill_between(steps, raw[:, 0], raw[:, 4], color=d.SERIES[0], alpha=0.15, lw=0, label="all")
        ax.fill_between(steps, raw[:, 1], raw[:, 3], color=d.SERIES[0], alpha=0.3, lw=0, label="middle half")
        ax.plot(steps, raw[:, 2], "o-", color=d.SERIES[0], ms=3.5, label="median")
        if np.nanmin(raw) <= context <= 3 * np.nanmax(raw):
            ax.axhline(context, color=d.MUTED, ls=":", lw=1.3, label="context")
        d.value_axis(ax, "half-life in tokens", raw)
        ax.legend(ncols=4, **d.ABOVE)

    before, after = raw[0, 4] / raw[0, 0], raw[-1, 4] / raw[-1, 0]
    text = (
        f"A typical head: its slowest channel lives {d.human(before)} times as long as its fastest at step "
        f"{steps[0]:,.0f} and {d.human(after)} times at step {steps[-1]:,.0f}. Channels that drift apart are what the "
        "channel-wise gate of KDA is for."
    )
    return Panel(title, d.figure(title, draw), text)


_NO_KDA = "no probe of KDA decays (none was made yet, or there is no KDA layer)"


def _kda_probes(run: Run) -> list[tuple[int, dict[tuple[int, int], list[float]]]]:
    """(step, five quantiles by (layer, head)) of every probe that has KDA layers."""
    found = []
    for probe in run.of("probe"):
        rows = [(x["layer"], h, q) for x in probe.get("half_lives") or [] for h, q in enumerate(x["heads"])]
        heads = {(layer, h): [number(v) for v in q] for layer, h, q in rows if len(q) == 5}
        if heads:
            found.append((probe["step"], heads))
    return found


def _positive(values: np.ndarray) -> np.ndarray:
    """Half-lives fit for a log axis: zero and infinity are drawn at the outermost finite value, NaN stays."""
    good = values[np.isfinite(values) & (values > 0)]
    low, high = (good.min(), good.max()) if good.size else (1.0, 1.0)
    return np.clip(values, low, high)


def update_spread(run: Run) -> Panel:
    """Largest over median per-head update norm of every matrix, over steps."""
    title = "Spread of the update over heads"
    steps, spread = _spread(run)
    if not spread:
        return missing(title, _NO_NORMS)
    kinds: dict[str, list[np.ndarray]] = {}
    for name, values in spread.items():
        kinds.setdefault(_matrix(name)[1], []).append(values)
    everything = np.array(list(spread.values()))

    def draw(ax: Axes) -> None:
        d.count_axis(ax, "step", steps)
        for i, (kind, lines) in enumerate(kinds.items()):
            color, marker = d.SERIES[i % 6], MARKS[i % 6]
            ax.plot(steps, np.array(lines).T, color=color, marker=marker, ms=2.5, lw=0.9, alpha=0.4)
            ax.plot(steps, np.median(lines, axis=0), color=color, marker=marker, ms=4, label=kind)
        d.value_axis(ax, "largest head / median head", everything)
        top = np.nanmax(everything, initial=1.0)
        ax.set_ylim(0.98, max(1.5, 1.05 * top))  # from "all equal" to a spread worth seeing
        ax.legend(ncols=3, **d.ABOVE)

    text = (
        "Each matrix thin, their median bold. Muon equalises the directions of a matrix; done head by head, one loud "
        "head cannot take the step of the others. At 1 all heads move equally far."
    )
    last = {name: values[-1] for name, values in spread.items() if math.isfinite(values[-1])}
    if last:
        widest = max(last, key=lambda name: last[name])
        text += f" Widest at the last probe: {_label(widest)}, {last[widest]:.2f}."
    return Panel(title, d.figure(title, draw), text + _optimizer(run))


def update_norms(run: Run) -> Panel:
    """Per-head update norms at the last probe, one row a matrix."""
    title = "Update norm of every head"
    probes = [(p["step"], _norms(p)) for p in run.of("probe") if _norms(p)]
    if not probes:
        return missing(title, _NO_NORMS)
    step, norms = probes[-1]
    every = np.array([v for heads in norms.values() for v in heads])

    def draw(ax: Axes) -> None:
        for y, heads in enumerate(norms.values()):
            ax.plot(heads, np.full(len(heads), y), "o", color=d.SERIES[0], ms=5, alpha=0.5, mew=0)
            ax.plot(np.nanmedian(heads), y, "|", color=d.INK, ms=11, mew=1.3)
        d.row_axis(ax, [_label(name) for name in norms])
        d.value_axis(ax, "Frobenius norm of the update / learning rate", every, "x")
        if ax.get_xscale() == "linear":
            ax.set_xlim(0, 1.08 * np.nanmax(every, initial=1e-12))

    text = (
        f"Step {step:,}: a dot a head, the bar their median. Dots on top of each other are heads that learn at one "
        "speed; matrices differ because their shapes do."
    )
    return Panel(title, d.figure(title, draw, d.row_height(len(norms))), text)


_NO_NORMS = "no probe of the update norms by head"


def _optimizer(run: Run) -> str:
    name = run.fact("optimizer")
    return f" This run's optimizer is {name}, not per-head Muon." if name and name != "per_head_muon" else ""


def _norms(probe: Record) -> dict[str, list[float]]:
    rows = {str(u["name"]): [number(v) for v in u["heads"]] for u in probe.get("update_norms") or []}
    return {name: heads for name, heads in rows.items() if np.isfinite(heads).any()}


def _spread(run: Run) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps [n], and by matrix its spreads [n]; NaN where a probe lacks the matrix."""
    probes = [(p["step"], _norms(p)) for p in run.of("probe") if _norms(p)]
    names = dict.fromkeys(name for _, norms in probes for name in norms)
    spread = {name: np.array([_max_over_median(norms.get(name, [])) for _, norms in probes]) for name in names}
    return np.array([step for step, _ in probes], dtype=np.float64), spread


def _max_over_median(heads: list[float]) -> float:
    good = [v for v in heads if math.isfinite(v)]
    median = float(np.median(good)) if good else 0.0
    return max(good) / median if median > 0 else math.nan


def _matrix(name: str) -> tuple[str, str]:
    """("3", "q_proj") of model.layers.3.self_attn.q_proj.weight."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return (layer[1] if layer else ""), name.removesuffix(".weight").rsplit(".", 1)[-1]


def _label(name: str) -> str:
    layer, matrix = _matrix(name)
    return f"layer {layer} {matrix}" if layer else matrix
