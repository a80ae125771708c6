"""The look of the experiments' figures: SVG with text as text, on a white card, the same bytes for the same record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, MUTED, GRID = "#22262b", "#5d656e", "#dcdcd6"
COLOURS = ("#0e6fa8", "#b75e3c", "#2fa373", "#62286b", "#b2891e", "#606b7c")  # no two alike to the colour-blind
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "openk3",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "axes.prop_cycle": cycler(color=COLOURS),
}


def panels(count: int, *, width: float = 4.2, height: float = 3.2, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, side by side and then below."""
    across = min(count, columns)
    down = -(-count // across)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * across, height * down), layout="constrained")
        axes = [figure.add_subplot(down, across, i + 1) for i in range(count)]
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG, without a date in it."""
    with matplotlib.rc_context(STYLE):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Mean over the last `window` values, over fewer at the beginning: [n]."""
    x = np.asarray(values, dtype=np.float64)
    total = np.concatenate([[0.0], np.cumsum(x)])
    first = np.maximum(np.arange(len(x)) + 1 - window, 0)
    return (total[1:] - total[first]) / (np.arange(len(x)) + 1 - first)
