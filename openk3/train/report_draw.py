"""Drawing for the report: one look for all figures, as SVG that follows the page's colours.

Matplotlib writes fixed colours. The figures are drawn with one marker colour a role, and the markers are replaced by
CSS variables afterwards: one figure serves light and dark pages, and its text is text, in the reader's own font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

WIDTH = 420  # units of a figure; a column of the page is about as many pixels, a phone a little fewer
BINS = 150  # a longer series is drawn as the mean of so many bins, inside their range
RAMP = 8  # shades from the first layer to the last

ROLES = ("ink", "muted", "grid", "paper", "heat", *(f"s{i}" for i in range(6)), *(f"d{i}" for i in range(RAMP)))
INK, MUTED, GRID, PAPER, HEAT, *_REST = (f"#fe{i:02x}01" for i in range(len(ROLES)))
SERIES, SHADES = _REST[:6], _REST[6:]
_VARIABLE = {f"#fe{i:02x}01": f"var(--{role})" for i, role in enumerate(ROLES)}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.labelspacing": 0.3,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "text.color": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Panel:
    """A titled figure with its sentences; `svg` None: a note that the run has no such lines."""

    title: str
    svg: str | None
    text: str


def missing(title: str, why: str) -> Panel:
    return Panel(title, None, f"Not in this run: {why}.")


def figure(title: str, draw: Callable[[Axes], None], height: float = 250) -> str:
    """One figure as an inline SVG element: `draw` fills its axes. Same data, same bytes."""
    style: dict[Any, Any] = _STYLE | {"svg.hashsalt": title}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        draw(fig.subplots())
        out = io.StringIO()
        FigureCanvasSVG(fig).print_svg(out, metadata={"Date": None})  # savefig would draw everything twice
    return _inline(out.getvalue(), title, height)


def _inline(svg: str, title: str, height: float) -> str:
    body = re.search(r"<svg[^>]*>(.*)</svg>", svg, re.S)
    assert body is not None
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", body[1], flags=re.S)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)  # would reach the whole page
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # every figure has a "figure_1"
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = text.replace("xlink:href", "href")
    for marker, variable in _VARIABLE.items():
        text = text.replace(marker, variable)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{text}</svg>'


def human(value: float, _position: object = None) -> str:
    """1234567 as "1.23M": three digits, for axes and tables. Not a number: nothing."""
    if not math.isfinite(value):
        return ""
    value = float(f"{value:.3g}")  # 999.9 is 1k
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def count_axis(ax: Axes, label: str, counts: np.ndarray, log: bool = False) -> None:
    """The x axis of steps or tokens; `log` where `counts` [n] span more than a factor of thirty."""
    ax.set_xlabel(label)
    if log and spans(counts):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(numticks=7))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(human))
    ax.margins(x=0.02)


def spans(counts: np.ndarray) -> bool:
    good = counts[np.isfinite(counts) & (counts > 0)]
    return bool(good.size and 30 * good.min() < good.max())


def places(counts: np.ndarray, log: bool) -> np.ndarray:
    """Where to draw [n] counts; on a log axis, which has no zero, the start stands half way before the first count."""
    if not (log and spans(counts)):
        return counts
    return np.maximum(counts, 0.5 * counts[counts > 0].min())


def value_axis(ax: Axes, label: str, values: np.ndarray, which: str = "y", log: bool = True) -> None:
    """A log axis where the values (any shape) span more than a factor of three, else a linear one."""
    good = values[np.isfinite(values) & (values > 0)]
    axis = ax.yaxis if which == "y" else ax.xaxis
    (ax.set_ylabel if which == "y" else ax.set_xlabel)(label)
    if log and good.size and good.max() > 3 * good.min():
        (ax.set_yscale if which == "y" else ax.set_xscale)("log")
        subs = (1.0, 2.0, 5.0) if good.max() < 300 * good.min() else (1.0,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=9))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(human))


def series(
    ax: Axes,
    x: np.ndarray,
    y: np.ndarray,
    color: str,
    label: str | None = None,
    *,
    log: bool = False,
    band: bool = True,
    line: Callable[[np.ndarray], float] = np.mean,
) -> None:
    """A line of [n] values over [n] positions, for `count_axis` with the same `log`.

    A long one is drawn bin by bin: `line` of the bin, its range behind where `band`, so that a spike stays. A value
    that is not finite breaks the line and leaves a cross on the axis.
    """
    x = places(x, log)
    bad = ~np.isfinite(y)
    if bad.any():
        ax.plot(x[bad], np.full(bad.sum(), 0.02), "x", color=color, ms=5, transform=ax.get_xaxis_transform())
    parts = _bins(x, log)
    if band and len(parts) < len(x):
        shaded(ax, x, y[:, None], color, log=log)
    where, middle = np.array([x[i].mean() for i in parts]), _reduced(line, y, parts)
    dots = len(parts) < 25 or np.isfinite(middle).sum() < 2
    ax.plot(where, middle, color=color, label=label, marker="o" if dots else None, ms=3.5)


def shaded(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, *, log: bool = False) -> None:
    """The range of [n, lines] values over [n] positions, bin by bin."""
    x = places(x, log)
    parts = _bins(x, log)
    where = np.array([x[i].mean() for i in parts])
    ax.fill_between(where, _reduced(np.min, y, parts), _reduced(np.max, y, parts), color=color, alpha=0.2, lw=0)


def _reduced(reduce: Callable[[np.ndarray], float], values: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """`reduce` over the finite values of each part, NaN where there is none."""
    good = (values[part][np.isfinite(values[part])] for part in parts)
    return np.array([float(reduce(part)) if part.size else np.nan for part in good])


def _bins(x: np.ndarray, log: bool) -> list[np.ndarray]:
    """Indices of [n] positions in at most BINS groups of equal width on the axis that will be drawn."""
    if len(x) <= BINS:
        return [np.array([i]) for i in range(len(x))]
    if log and spans(x):
        edges = np.unique(np.searchsorted(x, np.geomspace(x[0], x[-1], BINS + 1)[1:-1]))
        return [part for part in np.split(np.arange(len(x)), edges) if part.size]
    return np.array_split(np.arange(len(x)), BINS)


def shade(i: int, n: int) -> str:
    """Colour of layer i of n: from the first shade to the last."""
    return SHADES[round(i * (RAMP - 1) / max(n - 1, 1))]


def layer_legend(ax: Axes, labels: Sequence[str]) -> None:
    """Names every line where they are few, else the first, the middle and the last."""
    handles = ax.get_legend_handles_labels()[0]
    n = len(labels)
    keep = range(n) if n <= 4 else (0, n // 2, n - 1)
    ax.legend([handles[i] for i in keep], [labels[i] for i in keep], ncols=len(keep), **ABOVE)


ABOVE = {
    "loc": "lower right",
    "bbox_to_anchor": (1.0, 1.0),
    "borderaxespad": 0.1,
    "columnspacing": 1.2,
    "handletextpad": 0.5,
}


def row_axis(ax: Axes, labels: Sequence[str], most: int = 48) -> None:
    """Rows down the y axis, the first on top. Of many labels so many stay that each can be read; "" is none."""
    named = [i for i, label in enumerate(labels) if label]
    shown = named[:: -(-len(named) // most)]
    ax.set_yticks(shown, [labels[i] for i in shown])
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x")
    ax.spines["bottom"].set_visible(False)


def row_height(rows: int, each: float = 17) -> float:
    """Height of a figure with so many rows: room for a label a row while they are few, and a limit for many."""
    return 62 + min(rows * each, max(48 * each, min(rows * 4.0, 1600)))
