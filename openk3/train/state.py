"""Checkpoints: `step-00000100/model/` in the released layout, and `state/` with all that resuming needs beside it.

    state/tensors.safetensors    master.* (float32 parameters and router biases), optim.*, rng.*
    state/state.json             step, tokens, loader position, recipe, and the size of every file

A folder that bears its name is whole: it was written beside its place, synced and renamed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openk3 import disk
from openk3.chat.tokenizer import Tokenizer
from openk3.errors import Failure, UserError
from openk3.model.checkpoint import write_model
from openk3.model.container import entry_of, read, read_header, write_tensors
from openk3.model.files import compare
from openk3.model.k3 import K3
from openk3.train.folder import CHECKPOINTS, refuse_other_recipe
from openk3.train.optim import Optimizer
from openk3.train.recipe import Recipe, parse_recipe

FORMAT = 1
RANKS, TENSORS, STATE = "model/tiktoken.model", "state/tensors.safetensors", "state/state.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands, less its tensors. All plain numbers and text."""

    step: int
    tokens: int
    seconds: float
    loader: Mapping[str, int]
    corpus_hash: str  # empty where a model was put that has yet to read its first text


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    folders = (run / CHECKPOINTS).glob("step-*")
    return sorted(f for f in folders if re.fullmatch(r"step-\d{8}", f.name) and f.is_dir())


def latest(run: Path) -> Path | None:
    """The newest checkpoint, or None."""
    return next(reversed(checkpoints(run)), None)


def newest(path: Path) -> Path:
    """The newest checkpoint of a run folder; any other folder is itself. Raises UserError naming what is not there."""
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    if not (path / CHECKPOINTS).is_dir():
        return path
    found = latest(path)
    if found is None:
        raise UserError(f"{path} has no checkpoint yet; train it first")
    return found


def model_part(path: Path) -> Path:
    """The model folder of a run folder, of a checkpoint, or the folder itself. Raises UserError as `newest` does."""
    path = newest(path)
    return path / "model" if (path / "model").is_dir() else path


def save(
    run: Path,
    model: K3,
    optimizer: Optimizer,
    position: Position,
    recipe: Recipe,
    tokenizer: Tokenizer,
    keep: int,
) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`.

    Raises Failure, with the older checkpoints whole and no litter, when a weight is not finite or the disk is full.
    """
    refuse_non_finite(model, position.step)
    folder = checkpoint_folder(run, position.step)

    def fill(beside: Path) -> None:
        write_model(model, beside / "model")
        tokenizer.save(beside / RANKS)
        (beside / "state").mkdir()
        write_tensors(beside / TENSORS, state_tensors(model, optimizer))
        files = [file for file in beside.rglob("*") if file.is_file()]
        content = {
            "format": FORMAT,
            **vars(position),
            "recipe": recipe.to_toml(),
            "files": {file.relative_to(beside).as_posix(): file.stat().st_size for file in sorted(files)},
        }
        (beside / STATE).write_text(json.dumps(content, indent=1) + "\n")

    def advice() -> str:
        stands = latest(run)
        kept = f"{stands.name} is whole" if stands else "there is no checkpoint yet"
        return f"{folder.name} was not written, {kept}; free some space and run the same command again"

    if not folder.exists():
        with disk.disk_full_is_failure(run, advice):
            disk.write_folder(folder, fill)
    for old in checkpoints(run)[:-keep]:
        disk.remove_folder(old)
    return folder


def refuse_non_finite(model: nn.Module, step: int) -> None:
    """Raises Failure naming the first parameter with a NaN or an infinity."""
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise Failure(f"{name} is not finite after step {step}: no checkpoint was written; try a lower optim.lr")


def state_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The running tensors themselves, and the random state."""
    tensors = {f"master.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optim.{name}": tensor for name, tensor in optimizer.state_dict().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def load(folder: Path, model: K3, optimizer: Optimizer, recipe: Recipe) -> Position:
    """Put a checkpoint into a model and its optimizer. Returns where the run stands.

    Raises UserError, in one sentence, when the checkpoint is damaged or belongs to another recipe.
    """
    content = read_state(folder)
    refuse_other_recipe(recipe, parse_recipe(content["recipe"], where=str(folder / STATE)), str(folder))
    wanted = state_tensors(model, optimizer)
    try:
        spans = read_header(folder / TENSORS)
        if "rng.cuda" not in spans or "rng.cuda" not in wanted:  # written or read on a machine without a GPU
            spans.pop("rng.cuda", None)
            wanted.pop("rng.cuda", None)
        faults = compare(spans, [entry_of(name, tensor) for name, tensor in wanted.items()])
        if faults:
            raise ValueError("; ".join(faults))
        for name, tensor in wanted.items():
            read(spans[name], out=tensor)
        torch.set_rng_state(wanted["rng.cpu"])
        if "rng.cuda" in wanted:
            torch.cuda.set_rng_state(wanted["rng.cuda"])
    except (OSError, ValueError, RuntimeError) as error:
        raise damaged(folder, f"{TENSORS}: {error}") from None
    return Position(**{name: content[name] for name in Position.__dataclass_fields__})


def read_state(folder: Path) -> dict[str, Any]:
    """state.json, with every file it lists found at its size. Raises UserError."""
    try:
        content = json.loads((folder / STATE).read_text())
        sizes = dict(content["files"])
        missing = {"recipe", *Position.__dataclass_fields__} - content.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, f"{STATE} cannot be read, {type(error).__name__}: {error}") from None
    if missing or content.get("format") != FORMAT:
        raise damaged(folder, f"{STATE} is not of format {FORMAT}")
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            raise damaged(folder, f"{name} is missing")
        if found != size:
            raise damaged(folder, f"{name} has {found} bytes, {size} were written")
        if not os.access(folder / name, os.R_OK):
            raise UserError(f"checkpoint {folder}: {name} may not be read by this user")
    return content


def damaged(folder: Path, how: str) -> UserError:
    return UserError(f"checkpoint {folder} is damaged ({how}); remove it and the run goes on from the one before")
