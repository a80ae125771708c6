"""The look of the experiments' figures: SVG that takes the colours of the page it stands in, and has its own elsewhere.

The same record gives the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from openk3 import disk

INK, MUTED, GRID, PAPER = "#22262b", "#5d656e", "#dcdcd6", "#fcfcfa"
COLOURS = ("#0e6fa8", "#b75e3c", "#2fa373", "#62286b", "#b2891e", "#606b7c")  # no two alike to the colour-blind
# Lower case, as matplotlib writes them; the variables are those of report.html and of the site.
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {c: f"s{i}" for i, c in enumerate(COLOURS)}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.prop_cycle": cycler(color=COLOURS),
}


def panels(count: int, *, width: float = 3.8, height: float = 3.0, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, side by side and then below; sizes of one panel in inches."""
    across = min(count, columns)
    down = -(-count // across)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * across, height * down), layout="constrained")
        axes = [figure.add_subplot(down, across, i + 1) for i in range(count)]
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG, without a date in it."""
    out = io.StringIO()
    style: dict[Any, Any] = STYLE | {"svg.hashsalt": path.stem}
    with matplotlib.rc_context(style):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)  # would reach the whole page that shows the figure
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    for colour, name in VARIABLES.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    disk.write_file(path, text)


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Mean over the last `window` values, over fewer at the beginning: [n]."""
    x = np.asarray(values, dtype=np.float64)
    total = np.concatenate([[0.0], np.cumsum(x)])
    first = np.maximum(np.arange(len(x)) + 1 - window, 0)
    return (total[1:] - total[first]) / (np.arange(len(x)) + 1 - first)
