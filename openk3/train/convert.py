"""From one form of a model to another, a tensor at a time: float32 masters in `state/`, `model/` in bf16 or packed.

Out of a run or a checkpoint the masters are taken: packed experts are then what training with MXFP4 has seen, and
rounded once. Packed tensors that stay packed keep their bytes; a decoded one that is packed again keeps its values.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openk3.chat.tokenizer import Tokenizer
from openk3.config import K3Config
from openk3.data.progress import progress_bar
from openk3.errors import UserError
from openk3.model.checkpoint import Encoder, load_model, read_finite, save_folder, unpacked, write_layout
from openk3.model.container import Entry, Span, read_header
from openk3.model.files import ModelFolder, compare, open_model
from openk3.model.k3 import K3
from openk3.model.released import entries, meta_model, model_name, refuse_unpackable
from openk3.train import folder as names
from openk3.train.optim import Optimizer
from openk3.train.recipe import Recipe, load_recipe, parse_recipe
from openk3.train.state import STATE, TENSORS, Position, damaged, model_part, newest, read_state, save

RANKS = "tiktoken.model"
FORMS = ("bf16", "packed")


@dataclass(frozen=True)
class Source:
    """What is converted: the masters of a checkpoint, or a model folder; and the rank file beside them, if any."""

    config: K3Config
    masters: dict[str, Span] | None
    folder: ModelFolder | None
    ranks: Path | None
    packed: bool

    def fetch(self) -> Callable[[Entry], Tensor]:
        """The function that gives a tensor of the layout to be written."""
        encode = Encoder(self.full)
        kept = self.folder.spans if self.folder else {}
        return lambda entry: read_finite(kept, entry.name) if entry.name in kept else encode(entry)

    def full(self, released: str) -> Tensor:
        """A tensor before it is packed, by its released name."""
        if self.masters is not None:
            name, expert = model_name(released)
            return read_finite(self.masters, name, part=expert)
        assert self.folder is not None
        stem = released.removesuffix(".weight")
        if f"{stem}.weight_packed" in self.folder.spans:
            return unpacked(self.folder.spans, stem, torch.bfloat16)
        return read_finite(self.folder.spans, released)


@dataclass(frozen=True)
class Converted:
    """What was written."""

    path: Path
    experts: str
    tensors: int
    nbytes: int
    ranks: bool


def open_source(path: Path) -> Source:
    """A run folder (its newest checkpoint), a checkpoint, or a model folder, looked at but not read.

    Raises UserError or ValueError, in one sentence, for what is none of them or is damaged.
    """
    place, model = newest(path), model_part(path)
    ranks = model / RANKS
    beside = ranks if ranks.is_file() else None
    if (place / STATE).is_file():
        recipe = parse_recipe(read_state(place)["recipe"], where=str(place / STATE))
        return Source(recipe.model, read_masters(place, recipe), None, beside, open_model(model).packed)
    found = open_model(model)
    return Source(found.config, None, found, beside, found.packed)


def read_masters(checkpoint: Path, recipe: Recipe) -> dict[str, Span]:
    """The masters in `state/` by their names in the model, held against the config. Raises UserError."""
    dtype = "F64" if recipe.train.dtype == "float64" else "F32"
    try:
        spans = read_header(checkpoint / TENSORS)
        masters = {n.removeprefix("master."): span for n, span in spans.items() if n.startswith("master.")}
        own = meta_model(recipe.model).state_dict()
        faults = compare(masters, [Entry(name, dtype, tuple(tensor.shape)) for name, tensor in own.items()])
        if faults:
            raise ValueError("; ".join(faults))
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, f"{TENSORS}: {error}") from None
    return masters


def convert(path: Path, target: Path, *, experts: str | None = None, shown: bool = False) -> Converted:
    """Write the model in `path` as a model folder `target`, as released; experts as they are there unless told.

    Raises ValueError or UserError for wrong input, among it a model that K3's format cannot express, and Failure for a
    full disk. `target` is written whole or not at all.
    """
    if experts is not None and experts not in FORMS:
        raise ValueError(f"--experts {experts} is none of {', '.join(FORMS)}")
    source = open_source(path)
    config, packed = source.config, source.packed if experts is None else experts == "packed"
    refuse_inexpressible(path, config)
    if packed:
        refuse_unpackable(config)
    vision = source.folder is not None and source.folder.vision
    listed = entries(config, packed=packed, vision=vision)

    def fill(beside: Path) -> None:
        with progress_bar() if shown else nullcontext(lambda *_: None) as show:
            write_layout(beside, header(source, packed, vision), listed, source.fetch(), show)
        if source.ranks:
            shutil.copyfile(source.ranks, beside / RANKS)

    save_folder(target, fill)
    nbytes = sum(entry.nbytes for entry in listed)
    return Converted(target, FORMS[packed], len(listed), nbytes, source.ranks is not None)


def header(source: Source, packed: bool, vision: bool) -> dict[str, Any]:
    """config.json, with the vision part as the source has it."""
    hf = source.config.to_hf(packed=packed, vision=vision)
    if vision and source.folder is not None and "vision_config" in source.folder.hf:
        hf["vision_config"] = source.folder.hf["vision_config"]
    return hf


def refuse_inexpressible(path: Path, config: K3Config) -> None:
    """Raises ValueError naming each field that other engines would pass over, and compute something else."""
    if config.beyond_k3:
        fields = ", ".join(f"{name} = {value!r}" for name, value in config.beyond_k3.items())
        raise ValueError(f"{path} cannot be written as K3, whose format has no {fields}; only openk3 can run it")


def convert_to_state(path: Path, run: Path, recipe: str, overrides: Iterable[str] = ()) -> Path:
    """Make `run` a run folder that trains on from the weights in `path`: masters, a fresh optimizer, step 0.

    Data, budget and rates are the recipe's, model and vocabulary those of `path`. Returns the configuration to train
    with. Raises UserError, ValueError or Failure, and then leaves nothing behind.
    """
    overrides = list(overrides)
    if any(override.strip().startswith("model.") for override in overrides):
        raise UserError("the model is the one that is converted: leave out --set model....")
    source = open_source(path)
    if source.ranks is None:
        raise UserError(f"{model_part(path) / RANKS} is not there; training needs the vocabulary of the model")
    tokenizer = Tokenizer(source.ranks)
    if tokenizer.vocab_size != source.config.vocab_size:
        raise UserError(
            f"{source.ranks} gives {tokenizer.vocab_size} ids, but the model beside it has {source.config.vocab_size}"
        )
    given = load_recipe(recipe, overrides)
    data = dataclasses.replace(given.data, tokenizer=str(run.resolve() / names.TOKENIZER))
    resolved = dataclasses.replace(given, model=source.config, data=data)
    model = masters_of(source, torch.float64 if given.train.dtype == "float64" else torch.float32)

    def fill(beside: Path) -> None:
        (beside / names.CONFIG).write_text(resolved.to_toml(), encoding="utf-8")
        tokenizer.save(beside / names.TOKENIZER)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(given.train.seed)  # as training begins
            optimizer = Optimizer(model, source.config, resolved.optim)
            save(beside, model, optimizer, Position(0, 0, 0.0, {}, ""), resolved, tokenizer, keep=1)

    save_folder(run, fill)
    return run / names.CONFIG


def masters_of(source: Source, dtype: torch.dtype) -> K3:
    """The model with masters of `dtype`: those of the checkpoint, or the values of the model folder."""
    if source.folder is not None:
        return load_model(source.folder.path, dtype=dtype).to(dtype)
    assert source.masters is not None
    model = meta_model(source.config).to(dtype).to_empty(device="cpu")
    for name, target in model.state_dict().items():
        read_finite(source.masters, name, out=target)
    return model
