"""Experiments, each one command with a committed record: `openk3 experiment NAME`.

One module an experiment, named as the experiment is, with an EXPERIMENT in it (base.py says what that is).
"""

from __future__ import annotations

from importlib import import_module

from openk3.errors import UserError
from openk3.evals.experiments.base import Experiment

NAMES: tuple[str, ...] = ()


def load(name: str) -> Experiment:
    """An experiment by name, written with "_" or "-". Raises UserError listing the names."""
    module = name.replace("-", "_")
    if module not in NAMES:
        raise UserError(f"there is no experiment {name!r}; the experiments are {', '.join(NAMES)}")
    return import_module(f"{__name__}.{module}").EXPERIMENT


def questions() -> list[tuple[str, str]]:
    """(name, question) of every experiment."""
    return [(name, load(name).question) for name in NAMES]
