"""Experiments, each one command with a committed record: `openk3 experiment NAME`.

One module an experiment, with an EXPERIMENT in it (base.py says what that is).
"""

from __future__ import annotations

from importlib import import_module

from openk3.errors import UserError
from openk3.evals.experiments.base import Experiment

# Modules; the name of an experiment is that of its module with "-" for "_".
NAMES: tuple[str, ...] = (
    "k3_vs_k2like",
    "swaps",
    "balance_in_training",
    "situ_vs_swiglu",
    "attnres_depth",
)


def load(name: str) -> Experiment:
    """An experiment by name, written with "_" or "-". Raises UserError listing the names."""
    module = name.replace("-", "_")
    if module not in NAMES:
        known = ", ".join(NAMES).replace("_", "-")
        raise UserError(f"there is no experiment {name!r}; the experiments are {known}")
    return import_module(f"{__name__}.{module}").EXPERIMENT


def questions() -> list[tuple[str, str]]:
    """(name, question) of every experiment."""
    found = [load(name) for name in NAMES]
    return [(experiment.name, experiment.question) for experiment in found]
