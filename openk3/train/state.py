"""Checkpoints: `step-00000100/model/` in the released layout, and `state/` with all that resuming needs beside it.

    state/tensors.safetensors    master.* (float32 parameters and router biases), optim.*, rng.*
    state/state.json             step, tokens, loader position, recipe, and the size of every file

A folder that bears its name is whole: it was written beside its place, synced and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from openk3 import disk
from openk3.chat.tokenizer import Tokenizer
from openk3.errors import Failure, UserError
from openk3.model.checkpoint import save_model
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
    corpus_hash: str


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    folders = (run / CHECKPOINTS).glob("step-*")
    return sorted(f for f in folders if re.fullmatch(r"step-\d{8}", f.name) and f.is_dir())


def latest(run: Path) -> Path | None:
    """The newest checkpoint, or None."""
    return next(reversed(checkpoints(run)), None)


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
        save_model(model, beside / "model")
        tokenizer.save(beside / RANKS)
        (beside / "state").mkdir()
        save_file(state_tensors(model, optimizer), beside / TENSORS)
        files = [file for file in beside.rglob("*") if file.is_file()]
        content = {
            "format": FORMAT,
            **vars(position),
            "recipe": recipe.to_toml(),
            "files": {file.relative_to(beside).as_posix(): file.stat().st_size for file in sorted(files)},
        }
        (beside / STATE).write_text(json.dumps(content, indent=1) + "\n")
        shutil.copymode(beside / STATE, beside / TENSORS)  # which comes with mode 600, whatever the umask

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
    tensors = {f"master.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optim.{name}": tensor for name, tensor in optimizer.state_dict().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load(folder: Path, model: K3, optimizer: Optimizer, recipe: Recipe) -> Position:
    """Put a checkpoint into a model and its optimizer. Returns where the run stands.

    Raises UserError, in one sentence, when the checkpoint is damaged or belongs to another recipe.
    """
    content = read_state(folder)
    refuse_other_recipe(recipe, parse_recipe(content["recipe"], where=str(folder / STATE)), str(folder))
    try:
        tensors = load_file(folder / TENSORS)
        parts = {kind: section(tensors, kind) for kind in ("master.", "optim.", "rng.")}
        model.load_state_dict(parts["master."])
        optimizer.load_state_dict(parts["optim."])
        torch.set_rng_state(parts["rng."]["cpu"])
        if "cuda" in parts["rng."] and torch.cuda.is_available():
            torch.cuda.set_rng_state(parts["rng."]["cuda"])
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise damaged(folder, f"{TENSORS}: {error}") from None
    return Position(**{name: content[name] for name in Position.__dataclass_fields__})


def section(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
