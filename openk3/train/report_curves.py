"""The report's figures of single numbers over training: loss, rates, and the balance of the experts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from openk3.train import report_draw as d
from openk3.train.report_draw import Panel, missing
from openk3.train.report_read import Record, Run, column, number, table


def loss(run: Run) -> Panel:
    """Training and held-out loss against tokens."""
    text = (
        "Mean surprise over the next token. Held-out files are never trained on: what the training line gains on "
        "them is memory, what both gain is learning."
    )
    return _learning(run, "Loss", "loss", "nats per token", text)


def bits_per_byte(run: Run) -> Panel:
    """Bits per byte against tokens, the order-5 byte-context model as a dashed line."""
    baseline = number(run.corpus.get("order5_bpb"))
    text = "The same loss per byte of text, which no vocabulary can flatter. "
    if math.isfinite(baseline):
        text += (
            f"Counting which byte follows which five needs {baseline:.2f} (dashed): below it, the model uses more "
            "than spelling."
        )
    return _learning(run, "Bits per byte", "bpb", "bits per byte", text, baseline)


def _learning(run: Run, title: str, key: str, unit: str, text: str, baseline: float = math.nan) -> Panel:
    train, evals = run.of("train"), run.of("eval")
    if not train and not evals:
        return missing(title, "no step and no evaluation has been written")
    at, at_eval = column(train, "tokens"), column(evals, "tokens")
    where = d.places(np.concatenate([at, at_eval]), log=True)[len(at) :]

    def draw(ax: Axes) -> None:
        d.count_axis(ax, "tokens", np.concatenate([at, at_eval]), log=True)
        if train:
            d.series(ax, at, column(train, key), d.SERIES[0], "training", log=True)
        if evals:
            ax.plot(where, column(evals, key), "o-", color=d.SERIES[1], lw=1, ms=4, label="held-out")
        if math.isfinite(baseline):
            ax.axhline(baseline, color=d.MUTED, ls=(0, (4, 3)), lw=1.2, label="order-5 bytes")
        d.value_axis(ax, unit, column(train, key), log=False)
        ax.legend(ncols=3, **d.ABOVE)

    if 0 in at_eval and d.spans(at):
        text += " The untrained model stands at the left edge."
    text += _holes(train, key) + ("" if evals else " No evaluation has been written yet.")
    return Panel(title, d.figure(title, draw), text)


def learning_rate(run: Run) -> Panel:
    """The schedule."""
    text = (
        "A short warm-up, then the schedule. Muon's update is scaled to the size of AdamW's, so that one rate "
        "serves both optimizers."
    )
    return _one_line(run, "Learning rate", "lr", "learning rate", text, log=False)


def gradient_norm(run: Run) -> Panel:
    """Gradient norm, log axis."""
    text = (
        "A spike that the loss does not follow is one odd batch; a steady climb announces divergence. In a long run "
        "the line is the mean of a few steps and the band is their range."
    )
    return _one_line(run, "Gradient norm", "grad_norm", "norm before clipping", text, log=True)


def _one_line(run: Run, title: str, key: str, unit: str, text: str, log: bool) -> Panel:
    train = run.of("train")
    steps, values = column(train, "step"), column(train, key)
    if not np.isfinite(values).any():
        return missing(title, f"no training line has a finite {key}")

    def draw(ax: Axes) -> None:
        d.count_axis(ax, "step", steps)
        if log:
            d.series(ax, steps, values, d.SERIES[0])
        else:
            ax.plot(steps, values, color=d.SERIES[0], marker="o" if len(steps) < 25 else None, ms=3.5)
        d.value_axis(ax, unit, values, log=log)
        if not log:
            ax.set_ylim(bottom=0)

    return Panel(title, d.figure(title, draw), text + _holes(train, key))


def _holes(train: list[Record], key: str) -> str:
    """Says where a value that was measured is not finite."""
    bad = [r["step"] for r in train if isinstance(r.get(key), float) and not math.isfinite(r[key])]
    if not bad:
        return ""
    steps = f"Step {bad[0]}" if len(bad) == 1 else f"{len(bad)} steps, the first of them step {bad[0]},"
    return f" {steps} gave no finite value: a cross on the axis."


_RULES = {
    "quantile": (
        "Quantile Balancing (QB) sets each expert's bias anew after every step, to the quantile of the scores that "
        "would have given it its share: there is no step size to tune."
    ),
    "sign": (
        "This run moves each expert's bias by a small fixed step toward balance, the rule that K3's Quantile Balancing "
        "(QB) replaced."
    ),
    "none": "This run leaves the biases at zero: what K3's Quantile Balancing (QB) is there to prevent.",
}


def max_violation(run: Run) -> Panel:
    """MaxVio of every MoE layer over steps, the target load beside it."""
    text = "The busiest expert's load over the mean load, minus 1; grey is the range over layers and steps. "
    text += _RULES.get(str(run.fact("rule")), "")
    loads = column(run.of("train"), "q")
    loads = loads[np.isfinite(loads) & (loads > 0)]
    experts = run.model.num_experts if run.model else 0
    floor = math.nan
    if loads.size:
        text += f" The target load is q = {loads[-1]:,.0f} tokens an expert and step"
        if experts > 1:  # the largest of that many Poisson loads
            floor = math.sqrt(2 * math.log(experts) / loads[-1])
            text += f"; independent chance would leave about {floor:.2f} (dotted)"
        text += "."

    def draw(ax: Axes, values: np.ndarray) -> None:
        d.value_axis(ax, "max load / mean load - 1", values)
        if ax.get_yscale() == "linear":
            ax.set_ylim(bottom=0)
        if math.isfinite(floor):
            ax.axhline(floor, color=d.MUTED, ls=":", lw=1.3)

    return _by_layer(run, "MaxVio by layer", "maxvio", text, draw)


def dead_experts(run: Run) -> Panel:
    """Experts without a token in a step, by MoE layer."""
    counts = table(run.of("train"), "dead")
    text = "Experts that received no token in a step: they learned nothing from it. "
    steps = [r["step"] for r, row in zip(run.of("train"), counts, strict=True) if np.nansum(row) > 0]
    text += f"The last step with one is step {steps[-1]:,}." if steps else "There was none at any step."

    def draw(ax: Axes, values: np.ndarray) -> None:
        top = max(1.0, float(np.nanmax(values)))
        ax.set_ylabel("experts without a token")
        ax.set_ylim(-0.02 * top, 1.05 * top)
        ax.yaxis.set_major_locator(d.MaxNLocator(5, integer=True))

    return _by_layer(run, "Dead experts by layer", "dead", text, draw)


def _by_layer(run: Run, title: str, key: str, text: str, scale: Callable[[Axes, np.ndarray], None]) -> Panel:
    train = run.of("train")
    steps, values = column(train, "step"), table(train, key)
    if not np.isfinite(values).any():
        return missing(title, "no training line counts the loads of experts")
    n = values.shape[1]
    first = run.model.first_k_dense_replace if run.model else 1
    names = [f"layer {first + i}" for i in range(n)]
    line = np.max if key == "dead" else np.mean  # of the steps drawn as one: a dead expert must not average away

    def draw(ax: Axes) -> None:
        d.count_axis(ax, "step", steps, log=True)
        if key != "dead":
            d.shaded(ax, steps, values, d.MUTED, log=True)
        for i, name in enumerate(names):
            d.series(ax, steps, values[:, i], d.shade(i, n), name, log=True, band=False, line=line)
        scale(ax, values)
        d.layer_legend(ax, names)

    return Panel(title, d.figure(title, draw), text)
