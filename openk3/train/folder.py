"""The run folder: one process at a time, one configuration for ever."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openk3 import disk
from openk3.errors import UserError
from openk3.train.recipe import Recipe, first_difference, parse_recipe

CONFIG, LOCK, METRICS, CHECKPOINTS, SAMPLES, TOKENIZER = (
    "config.toml",
    ".lock",
    "metrics.jsonl",
    "checkpoints",
    "samples",
    "tokenizer.model",
)


@contextmanager
def open_run(path: Path, recipe: Recipe) -> Iterator[Path]:
    """Hold a run folder for this process, new or met again, swept of half-written files.

    Raises UserError when another process holds it, or when it belongs to a different configuration.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path} is not a folder; choose another name for the run") from None
    except PermissionError:
        raise UserError(f"{path} cannot be written; choose a folder of your own for the run") from None
    try:
        lock(handle, path)
        for place in (path, path / CHECKPOINTS, path / SAMPLES):
            disk.sweep(place)
        claim(path, recipe)
        yield path
    finally:
        os.close(handle)  # and with it the lock, as a kill would


def lock(handle: int, path: Path) -> None:
    """Take the folder's lock and leave this process's number in it. Raises UserError with the holder's."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 32, 0).decode().strip() or "that is just starting"
        raise UserError(f"{path} is in use by process {holder}; wait for it, or choose another run name") from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)


def claim(path: Path, recipe: Recipe) -> None:
    """Write the configuration into a folder where nothing was trained yet; in an old one it must be equal."""
    file = path / CONFIG
    begun = (path / METRICS).exists() or (path / CHECKPOINTS).exists()
    if not file.exists() or not begun:  # a run whose data could not be read leaves its configuration alone behind
        disk.write_file(file, recipe.to_toml())
        return
    refuse_other_recipe(recipe, parse_recipe(file.read_text(encoding="utf-8"), where=str(file)), str(path))


def refuse_other_recipe(recipe: Recipe, stored: Recipe, place: str) -> None:
    """Raises UserError naming the first key on which the two differ."""
    difference = first_difference(recipe, stored)
    if difference:
        key, now, then = difference
        raise UserError(
            f"{place} was trained with {key} = {then!r}, not {now!r}; choose another run name or set it back"
        )
