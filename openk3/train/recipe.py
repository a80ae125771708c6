"""A recipe: everything that decides a pre-training run, as one frozen value read from TOML.

    [model]    size = "nano", and any field of K3Config      [data]     source, cleaning, context, mixture
    [train]    budget, batch, evaluation, device             [optim]    optimizer and its rates
    [balance]  the rule that keeps experts equally busy

What a file leaves out comes from the table of its size below; `to_toml` writes every value, so that the copy in a
run folder says all there is to know. Numbers marked "ours" are not published.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openk3
from openk3.config import K3Config, named
from openk3.errors import UserError
from openk3.train import toml
from openk3.train.curriculum import Contexts, first_steps, longest, read_contexts, stages_of


@dataclass(frozen=True)
class DataRecipe:
    """Which text, how long a sequence of it may be, and what long documents are worth (training.md sections 5, 6).

    Empty options are left to the source.
    """

    source: str | tuple[str, ...] = "stdlib"  # "stdlib", "installed", "hf:NAME", a glob or a list of globs
    field: str = ""
    split: str = ""
    subset: str = ""
    limit: int = 0
    tokenizer: str = ""  # rank file; empty: a BPE of the size's rank count is trained on the training documents
    clean: bool = False  # leave out copies, near copies and garbage
    context: Contexts = 512  # or stages [[tokens, share of the run], ...]: see curriculum.py
    # Raise the share of documents of at least long_tokens tokens to long_share; 0: the text as it is.
    long_tokens: int = 0
    long_share: float = 0.0
    long_from: float = 0.0  # after this share of the run: the report does it in its cooldown
    # Documents of up to joined_tokens tokens made of short ones, to a share of joined_share in the training text.
    joined_tokens: int = 0
    joined_share: float = 0.0


@dataclass(frozen=True)
class TrainRecipe:
    """Budget (either tokens or steps), batch, and what happens along the way."""

    tokens: int = 0
    steps: int = 0
    batch_tokens: int = 8192
    micro_tokens: int = 8192  # most tokens of one forward and backward; the gradients of a batch are summed
    seed: int = 0
    eval_every: int = 100
    eval_tokens: int = 65536  # held-out tokens of an evaluation; the last one reads all of them
    save_every: int = 100
    keep_checkpoints: int = 2
    sample_prompts: tuple[str, ...] = ("def ", "class ", "import ")
    sample_tokens: int = 64
    device: str = "cpu"
    dtype: str = "float32"  # of activations and matmul operands; parameters are float32 masters


@dataclass(frozen=True)
class OptimRecipe:
    """Per-head Muon for the matrices, AdamW for the rest, one learning rate (training.md section 2)."""

    optimizer: str = "per_head_muon"
    lr: float = 3e-3
    warmup: float = 0.01
    lr_min_ratio: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0  # gradient norm, 0: no clipping; ours
    qk_clip_tau: float = 100.0  # 0: no QK-clip


@dataclass(frozen=True)
class BalanceRecipe:
    """Quantile Balancing, or what it replaced (training.md section 4)."""

    rule: str = "quantile"
    bins: int = 1000
    rate: float = 1e-3  # read by rule = "sign" alone


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe."""

    size: str
    model: K3Config
    data: DataRecipe
    train: TrainRecipe
    optim: OptimRecipe
    balance: BalanceRecipe

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.train.steps or math.ceil(self.train.tokens / self.train.batch_tokens)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Every value, by section."""
        tables = {"model": {"size": self.size} | dataclasses.asdict(self.model)}
        return tables | {name: dataclasses.asdict(getattr(self, name)) for name in _SECTIONS}

    def to_toml(self) -> str:
        """Complete TOML; reading it gives an equal recipe."""
        return toml.dumps(self.tables())


_SECTIONS: dict[str, type] = {
    "data": DataRecipe,
    "train": TrainRecipe,
    "optim": OptimRecipe,
    "balance": BalanceRecipe,
}

# Start values by size (decisions.md); budgets, micro-batches and intervals are ours.
SIZE_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "pico": {
        "data": {"context": 128},
        "train": {"tokens": 262_144, "batch_tokens": 2048, "micro_tokens": 2048, "eval_tokens": 8192},
        "optim": {"lr": 5e-3},
    },
    "nano": {
        "data": {"context": 1024},
        "train": {
            "tokens": 2_867_200, "batch_tokens": 4096, "micro_tokens": 4096, "eval_every": 140, "eval_tokens": 32_768,
            "save_every": 140,
        },
        "optim": {"lr": 4e-3},
    },
    "mini": {
        "data": {"context": 2048, "source": "installed"},
        "train": {
            "tokens": 262_144_000, "batch_tokens": 131_072, "micro_tokens": 32_768, "eval_every": 250,
            "eval_tokens": 524_288, "save_every": 250, "device": "cuda",
        },
        "optim": {"lr": 1.5e-3},
    },
    "small": {
        "data": {"context": 4096, "source": "installed"},
        "train": {
            "tokens": 5_242_880_000, "batch_tokens": 262_144, "micro_tokens": 16_384, "eval_every": 500,
            "eval_tokens": 1_048_576, "save_every": 500, "device": "cuda",
        },
        "optim": {"lr": 6e-4},
    },
}  # fmt: skip

_POSITIVE = (
    "data.context train.batch_tokens train.micro_tokens train.eval_every train.save_every train.keep_checkpoints "
    "optim.lr balance.bins balance.rate"
).split()
_NOT_NEGATIVE = (
    "data.limit data.long_tokens data.joined_tokens train.tokens train.steps train.seed train.eval_tokens "
    "train.sample_tokens optim.weight_decay optim.clip optim.qk_clip_tau"
).split()
_SHARES = "optim.warmup optim.lr_min_ratio".split()  # 0 to 1, both allowed
_PARTS = "data.long_share data.long_from data.joined_share".split()  # 0 to below 1
_COUNTS = (  # at most 2**31 - 1: token offsets are int32
    "data.context data.long_tokens data.joined_tokens train.batch_tokens train.micro_tokens train.eval_tokens "
    "train.sample_tokens balance.bins"
).split()
_CHOICES: dict[str, tuple[str, ...]] = {
    "train.device": ("cpu", "cuda"),
    "train.dtype": ("float32", "bfloat16", "float64"),
    "optim.optimizer": ("per_head_muon", "muon", "adamw"),
    "balance.rule": ("quantile", "sign", "none"),
}


def builtin_recipes() -> dict[str, Path]:
    """Recipes that come with openk3, by name: beside the package in a checkout, inside it when installed."""
    package = Path(openk3.__file__).parent
    files = [file for folder in (package.parent / "recipes", package / "recipes") for file in folder.glob("*.toml")]
    return {file.stem: file for file in sorted(files)}


def load_recipe(source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, or a built-in recipe by name, and apply overrides written "section.key=value".

    Raises UserError with one sentence: no such recipe, broken TOML, an unknown key and its nearest known one, or a
    value that cannot be.
    """
    builtin = builtin_recipes()
    file = builtin.get(str(source), Path(source))
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = ", ".join(builtin)
        raise UserError(f"there is no recipe {str(source)!r}: give a TOML file or one of {names}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {file} cannot be read: {error}") from None
    return parse_recipe(text, overrides, where=str(source))


def parse_recipe(text: str, overrides: Iterable[str] = (), *, where: str = "recipe") -> Recipe:
    """The recipe in a TOML text. Raises UserError as `load_recipe` does; `where` names the text."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {where} is not TOML: {error}") from None
    for section, values in tables.items():
        if not isinstance(values, dict):
            raise UserError(f"recipe {where}: {unknown_key(section)}")
    for override in overrides:
        key, value = parse_override(override)
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    try:
        return resolve(tables)
    except ValueError as error:
        raise UserError(f"recipe {where}: {error}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """ "section.key=value" as (key, value); what is no TOML value is taken as text."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise UserError(f"override {text!r} is not of the form section.key=value")
    if key not in known_keys():
        raise UserError(f"override {text!r}: {unknown_key(key)}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def known_keys() -> list[str]:
    """Every key a recipe may hold, dotted."""
    keys = ["model.size"] + [f"model.{f.name}" for f in dataclasses.fields(K3Config)]
    return keys + [f"{name}.{f.name}" for name, cls in _SECTIONS.items() for f in dataclasses.fields(cls)]


def unknown_key(key: str) -> str:
    """One sentence about a key that does not exist, with the nearest that does."""
    keys = known_keys()
    same_name = [k for k in keys if k.partition(".")[2] == key.rpartition(".")[2]]
    near = same_name or difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
    return f"there is no key {key!r}; the nearest is {near[0]!r}"


def resolve(tables: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """Fill in the size's defaults and check every value. Raises ValueError naming the key and the value."""
    keys = known_keys()
    for section, values in tables.items():
        if section != "model" and section not in _SECTIONS:
            raise ValueError(unknown_key(section))
        for name in values:
            if f"{section}.{name}" not in keys:
                raise ValueError(unknown_key(f"{section}.{name}"))
    size = tables.get("model", {}).get("size", "nano")
    if not isinstance(size, str) or size not in SIZE_DEFAULTS:
        raise ValueError(f"model.size = {size!r} is not one of {', '.join(SIZE_DEFAULTS)}")
    sections = {name: read_section(name, cls, with_defaults(size, name, tables)) for name, cls in _SECTIONS.items()}
    recipe = Recipe(size, read_model(size, tables.get("model", {})), **sections)
    check_budget(recipe)
    return recipe


def with_defaults(size: str, section: str, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of a section over the defaults of the size; defaults give way where they would clash."""
    given = dict(tables.get(section, {}))
    values = SIZE_DEFAULTS[size].get(section, {}) | given
    if section == "train":
        if given.get("steps") and "tokens" not in given:
            values["tokens"] = 0
        if "micro_tokens" not in given and isinstance(values["batch_tokens"], int):
            values["micro_tokens"] = min(values["micro_tokens"], values["batch_tokens"])
        values.setdefault("dtype", "bfloat16" if values.get("device") == "cuda" else "float32")
    return values


def read_section(section: str, cls: type, values: Mapping[str, Any]) -> Any:
    """One section as its dataclass, types and ranges checked. Raises ValueError."""
    hints = typing.get_type_hints(cls)
    checked = {name: coerce(f"{section}.{name}", value, hints[name]) for name, value in values.items()}
    result = cls(**checked)
    for field in dataclasses.fields(result):
        check_range(f"{section}.{field.name}", getattr(result, field.name))
    return result


def coerce(key: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`; a whole float passes for an int (4e6), an int for a float, a list for a tuple of texts."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == Contexts:
        return read_contexts(key, value)
    if isinstance(kind, types.UnionType):  # text or a list of texts
        return tuple(coerce(key, item, str) for item in value) if isinstance(value, list) else coerce(key, value, str)
    if kind is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if kind is float and number and abs(value) <= sys.float_info.max:
        return float(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(coerce(key, item, str) for item in value)
    words = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
    raise ValueError(f"{key} = {value!r} is not {words.get(kind, 'a list of texts')}")


def check_range(key: str, value: Any) -> None:
    if key == "data.context" and isinstance(value, tuple):
        for context, _ in value:
            check_range(key, context)
        return
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ValueError(f"{key} = {value!r} is not one of {', '.join(_CHOICES[key])}")
    if key in _POSITIVE and not value > 0:
        raise ValueError(f"{key} = {value} must be above 0")
    if key in _NOT_NEGATIVE and not value >= 0:
        raise ValueError(f"{key} = {value} must not be negative")
    largest = 2**31 - 1 if key in _COUNTS else 2**63 - 1
    if isinstance(value, int) and value > largest:
        raise ValueError(f"{key} = {value} is too large; at most {largest} can be")
    if key in _PARTS and not 0 <= value < 1:
        raise ValueError(f"{key} = {value} must be at least 0 and below 1")
    if key in _SHARES and not 0 <= value <= 1:
        raise ValueError(f"{key} = {value} must be between 0 and 1")


def check_budget(recipe: Recipe) -> None:
    """What two values together forbid. Raises ValueError naming both."""
    train, data, context = recipe.train, recipe.data, longest(recipe.data.context)
    if bool(train.tokens) == bool(train.steps):
        raise ValueError(
            f"train.tokens = {train.tokens} and train.steps = {train.steps}: the budget is one of the two, "
            "the other must be 0"
        )
    if train.micro_tokens < min(context, train.batch_tokens):
        raise ValueError(
            f"train.micro_tokens = {train.micro_tokens} is below data.context = {context}: a piece of text would be cut"
        )
    if len(stages_of(data.context)) > 1 and context > train.batch_tokens:
        raise ValueError(
            f"train.batch_tokens = {train.batch_tokens} is below the stage of data.context with {context} tokens: "
            "no sequence would be that long"
        )
    try:
        first_steps(data.context, recipe.steps)
    except ValueError as error:
        raise ValueError(f"data.context: {error}") from None
    for name in ("long", "joined"):
        tokens, share = getattr(data, f"{name}_tokens"), getattr(data, f"{name}_share")
        if bool(tokens) != bool(share):
            raise ValueError(
                f"data.{name}_tokens = {tokens} and data.{name}_share = {share}: either both are 0 or none is"
            )


def read_model(size: str, values: Mapping[str, Any]) -> K3Config:
    """The size's K3Config with the overrides of [model]. Raises ValueError naming the field and the value."""
    hints = typing.get_type_hints(K3Config)
    changes = {name: coerce(f"model.{name}", v, hints[name]) for name, v in values.items() if name != "size"}
    try:
        return named(size).replace(**changes)
    except ValueError as error:
        raise ValueError(f"[model] {error}") from None


def first_difference(ours: Recipe, theirs: Recipe) -> tuple[str, Any, Any] | None:
    """The first key, in file order, on which two recipes differ, with both values; None for equal recipes."""
    other = theirs.tables()
    for section, values in ours.tables().items():
        for name, value in values.items():
            if value != other[section][name]:
                return f"{section}.{name}", value, other[section][name]
    return None
