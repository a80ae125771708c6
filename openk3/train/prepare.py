"""From a recipe and a folder to everything a step needs, fresh or from the last checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from openk3 import disk
from openk3.chat.tokenizer import Tokenizer
from openk3.data.loader import Batch, Loader, eval_batches
from openk3.data.mixing import MixPlan
from openk3.data.ngram import NgramModel
from openk3.data.progress import progress_bar
from openk3.data.sources import Corpus, load_corpus, split
from openk3.data.tokens import Prepared, prepare
from openk3.errors import UserError
from openk3.model.k3 import K3
from openk3.train import folder as names
from openk3.train.balance import Balancer
from openk3.train.curriculum import longest
from openk3.train.heap import keep_freed_memory
from openk3.train.metrics import Metrics
from openk3.train.optim import Optimizer
from openk3.train.qkclip import QKClip
from openk3.train.recipe import DataRecipe, Recipe
from openk3.train.state import Position, latest, load, save

ORDER5_BYTES = 1 << 25  # the byte model is fitted on at most so much text


@dataclass
class Run:
    """A run under way. What changes from step to step: the tensors inside, the loader, step, tokens, seconds."""

    recipe: Recipe
    folder: Path
    corpus: Prepared
    model: K3
    optimizer: Optimizer
    balancer: Balancer
    clip: QKClip
    loader: Loader
    metrics: Metrics
    device: torch.device
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def held_out(self, max_tokens: int | None) -> Iterator[Batch]:
        """The first so many held-out tokens of a fixed order, or all; in the longest context of the run, so that
        the figures of all its stages are of the same sequences."""
        side = self.corpus.held_out
        return eval_batches(
            side.tokens,
            side.offsets,
            context=longest(self.recipe.data.context),
            batch_tokens=self.recipe.train.micro_tokens,
            token_bytes=self.corpus.tokenizer.token_bytes,
            max_tokens=max_tokens,
        )

    def write(self, kind: str, **values: object) -> None:
        self.metrics.write(kind, self.step, self.tokens, **values)

    def save(self) -> Path:
        """A checkpoint of this very step, its metrics made durable first."""
        self.metrics.sync()
        position = Position(self.step, self.tokens, self.seconds, self.loader.state_dict(), self.corpus.corpus_hash)
        keep, tokenizer = self.recipe.train.keep_checkpoints, self.corpus.tokenizer
        return save(self.folder, self.model, self.optimizer, position, self.recipe, tokenizer, keep)


def cache_folder() -> Path:
    """Where encoded corpora are kept: OPENK3_CACHE, else the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("OPENK3_CACHE") or Path(base, "openk3"))


def read_corpus(data: DataRecipe) -> Corpus:
    """The documents of [data]. Raises UserError in the words of the source."""
    options = {name: getattr(data, name) for name in ("field", "split", "subset", "limit") if getattr(data, name)}
    source = list(data.source) if isinstance(data.source, tuple) else data.source
    try:
        return load_corpus({"source": source} | options)
    except ValueError as error:
        raise UserError(f"data.source: {error}") from None


def encode(corpus: Corpus, recipe: Recipe, shown: bool) -> Prepared:
    """Vocabulary and ids of a corpus, from the cache where it has them. Raises UserError."""
    try:
        tokenizer = read_tokenizer(recipe.data)
        with usable_cache(cache_folder()) as cache:
            if not shown:
                return prepare(corpus, recipe.model.n_ranks, cache, tokenizer=tokenizer)
            with progress_bar() as progress:
                return prepare(corpus, recipe.model.n_ranks, cache, tokenizer=tokenizer, progress=progress)
    except ValueError as error:
        raise UserError(f"[data] {error}") from None


def read_tokenizer(data: DataRecipe) -> Tokenizer | None:
    """The vocabulary that [data] names, if it names one. Raises UserError, or ValueError for a damaged file."""
    try:
        return Tokenizer(Path(data.tokenizer)) if data.tokenizer else None
    except FileNotFoundError:
        raise UserError(f"data.tokenizer: there is no file {data.tokenizer}") from None
    except OSError as error:
        raise UserError(f"data.tokenizer: {data.tokenizer} cannot be read, {error.strerror}") from None


@contextmanager
def usable_cache(folder: Path) -> Iterator[Path]:
    """Name the cache where writing into it fails: its disk is not always that of the run."""
    try:
        with disk.disk_full_is_failure(folder, lambda: "free some space, or put the cache elsewhere by OPENK3_CACHE"):
            yield folder
    except (PermissionError, NotADirectoryError, FileExistsError):
        raise UserError(f"the cache {folder} cannot be written; put it elsewhere by OPENK3_CACHE") from None


def device_of(recipe: Recipe) -> torch.device:
    """The device the recipe names. Raises UserError when this machine has none."""
    if recipe.train.device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device = 'cuda', but there is no GPU here; try --set train.device=cpu")
    return torch.device(recipe.train.device)


def new_model(recipe: Recipe, device: torch.device) -> K3:
    """A fresh model, a pure function of config and seed; float32 masters whatever the compute dtype."""
    dtype = getattr(torch, recipe.train.dtype)
    model = K3.initialised(recipe.model, recipe.train.seed, compute_dtype=dtype)
    return model.to(device, torch.promote_types(dtype, torch.float32)).train()


def start(recipe: Recipe, folder: Path, say: Callable[[str], None], *, shown: bool) -> Run:
    """Everything for the next step, in a folder already held. Raises UserError as its parts do."""
    device = device_of(recipe)
    if device.type == "cpu":
        keep_freed_memory()
    corpus = read_corpus(recipe.data)
    prepared = encode(corpus, recipe, shown)
    plan = mix_plan(prepared, recipe.data)
    torch.manual_seed(recipe.train.seed)
    model = new_model(recipe, device)
    optimizer = Optimizer(model, recipe.model, recipe.optim)
    loader = Loader(
        prepared.train.tokens,
        prepared.train.offsets,
        batch_tokens=recipe.train.batch_tokens,
        context=longest(recipe.data.context),
        seed=recipe.train.seed,
        token_bytes=prepared.tokenizer.token_bytes,
        mix=plan.order if plan else None,
    )
    checkpoint = latest(folder)
    position = resume(checkpoint, recipe, prepared, model, optimizer, loader) if checkpoint else None
    metrics = Metrics(folder / names.METRICS, position.step if position else -1, folder / "tensorboard")
    run = Run(
        recipe, folder, prepared, model, optimizer, Balancer(model, recipe.balance),
        QKClip(model, recipe.optim.qk_clip_tau), loader, metrics, device,
    )  # fmt: skip
    if position:
        run.step, run.tokens, run.seconds = position.step, position.tokens, position.seconds
        say(f"going on from step {run.step} of {recipe.steps}")
    else:
        prepared.tokenizer.save(folder / names.TOKENIZER)
        shutil.rmtree(folder / names.SAMPLES, ignore_errors=True)
        describe(run, corpus, say)
    return run


def mix_plan(prepared: Prepared, data: DataRecipe) -> MixPlan | None:
    """How often documents are read, if [data] raises the share of long ones. Raises UserError."""
    if not data.long_share:
        return None
    try:
        return MixPlan(np.diff(prepared.train.offsets), data.long_tokens, data.long_share)
    except ValueError as error:
        raise UserError(f"data.long_tokens, data.long_share: {error}") from None


def resume(
    checkpoint: Path, recipe: Recipe, prepared: Prepared, model: K3, optimizer: Optimizer, loader: Loader
) -> Position:
    """Put a checkpoint everywhere. Raises UserError when it is damaged, or of another recipe or corpus."""
    position = load(checkpoint, model, optimizer, recipe)
    if position.corpus_hash != prepared.corpus_hash:
        raise UserError(
            f"the text of data.source has changed since {checkpoint} (corpus {prepared.corpus_hash[:12]}, then "
            f"{position.corpus_hash[:12]}); choose another run name"
        )
    loader.load_state_dict(dict(position.loader))
    return position


def describe(run: Run, corpus: Corpus, say: Callable[[str], None]) -> None:
    """Write the "corpus" line, with the bits per byte of an order-5 byte model on the held-out text."""
    prepared = run.corpus
    train, held_out = split(corpus)
    opponent = NgramModel((document.text for document in train), order=5, max_bytes=ORDER5_BYTES)
    order5 = opponent.bits_per_byte(document.text for document in held_out)
    run.write(
        "corpus",
        hash=prepared.corpus_hash,
        files=prepared.files,
        bytes=prepared.bytes,
        held_out_files=prepared.held_out_files,
        held_out_bytes=prepared.held_out_bytes,
        order5_bpb=order5,
    )
    say(
        f"corpus {prepared.corpus_hash[:12]}: {prepared.files:,} documents, {prepared.bytes:,} bytes, of them held out "
        f"{prepared.held_out_files:,} and {prepared.held_out_bytes:,}; an order-5 byte model needs {order5:.3f} bits "
        "per byte"
    )
