"""Reads a run folder for its report: config.toml, metrics.jsonl and samples/.

A run may be killed at any byte and resumed later, so the reader is patient: a line that is no JSON object is left out
and counted, and of two lines about the same step the later one holds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openk3.config import K3Config, named
from openk3.errors import UserError

Record = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One continuation the model wrote while it was trained."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Run:
    """What a run folder says about itself. `records` is by kind, each list in order of steps."""

    name: str
    config: Record
    config_text: str
    records: dict[str, list[Record]]
    samples: list[Sample]
    left_out: list[int]  # numbers of the unreadable lines, the last one excepted

    def of(self, kind: str) -> list[Record]:
        return self.records.get(kind, [])

    @property
    def model(self) -> K3Config | None:
        """The [model] section, completed by its named size; None where it does not describe a model."""
        section = self.config.get("model")
        section = section if isinstance(section, dict) else {}
        fields = {f.name for f in dataclasses.fields(K3Config)}
        try:
            base = dataclasses.asdict(named(section["size"])) if "size" in section else {}
            return K3Config(**(base | {k: v for k, v in section.items() if k in fields}))
        except (ValueError, TypeError):
            return None

    @property
    def corpus(self) -> Record:
        return self.of("corpus")[-1] if self.of("corpus") else {}

    def fact(self, *names: str) -> Any:
        """The first of these settings found in the config or among the rarer lines of the metrics, else None."""
        plain = [r for kind, rows in self.records.items() if kind not in _SERIES for r in rows]
        for name in names:
            for place in (self.config, *plain):
                value = _find(place, name)
                if value is not None:
                    return value
        return None


_SERIES = ("train", "eval", "probe", "sample")


def read_run(run_dir: Path) -> Run:
    """Read `run_dir`. Raises UserError where there is no metrics.jsonl or not one whole line in it."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is not there: a report needs a run folder whose training has begun")
    records, left_out = _records(path.read_bytes())
    if not any(records.values()):
        raise UserError(f"{path} holds no whole line yet: let the run finish one step, then write the report")
    config_text, config = _config(run_dir / "config.toml")
    return Run(run_dir.resolve().name, config, config_text, records, _samples(run_dir, records), left_out)


def number(value: Any) -> float:
    """A float; NaN for whatever is no number (None marks a value that a run did not measure)."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def column(records: Iterable[Record], key: str) -> np.ndarray:
    """[n] float64 of one field, NaN where it is absent."""
    return np.array([number(r.get(key)) for r in records], dtype=np.float64)


def table(records: list[Record], key: str) -> np.ndarray:
    """[n, widest] float64 of a field that holds a list, NaN where a list is short or absent."""
    lists = [value if isinstance(value := r.get(key), list) else [] for r in records]
    out = np.full((len(lists), max(map(len, lists), default=0)), math.nan)
    for row, values in zip(out, lists, strict=True):
        row[: len(values)] = [number(v) for v in values]
    return out


def _records(raw: bytes) -> tuple[dict[str, list[Record]], list[int]]:
    lines = raw.decode("utf-8", errors="replace").split("\n")
    latest: dict[tuple[Any, ...], Record] = {}
    left_out = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            if i < len(lines) - 1:  # no newline after the last one: the run was killed while writing it
                left_out.append(i + 1)
            continue
        step = number(record.get("step"))
        record["step"] = int(step) if math.isfinite(step) else 0
        extra = (record.get("prompt"), record.get("text")) if record["kind"] == "sample" else ()
        latest[record["kind"], record["step"], *map(str, extra)] = record
    by_kind: dict[str, list[Record]] = {}
    for record in sorted(latest.values(), key=lambda r: r["step"]):
        by_kind.setdefault(record["kind"], []).append(record)
    return by_kind, left_out


def _config(path: Path) -> tuple[str, Record]:
    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return text, {}  # the text is still worth showing


def _samples(run_dir: Path, records: dict[str, list[Record]]) -> list[Sample]:
    found = [Sample(r["step"], str(r.get("prompt", "")), str(r.get("text", ""))) for r in records.get("sample", [])]
    for path in sorted(run_dir.glob("samples/step-*.json")):
        try:
            step = int(path.stem.removeprefix("step-"))
            content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except ValueError:
            continue  # half written, or not ours
        if isinstance(content, dict):
            content = content.get("samples", [content])
        items = [x for x in content if isinstance(x, dict) and "text" in x] if isinstance(content, list) else []
        found += [Sample(step, str(x.get("prompt", "")), str(x["text"])) for x in items]
    return sorted(dict.fromkeys(found), key=lambda s: s.step)


def _find(place: Any, name: str) -> Any:
    if not isinstance(place, dict):
        return None
    if name in place and not isinstance(place[name], dict):
        return place[name]
    inner = (_find(value, name) for value in place.values())
    return next((value for value in inner if value is not None), None)
