"""A model folder as it lies on disk: config.json, index, shards; held against its config from the headers alone.

Nothing of the tensors is read until all their names, shapes, dtypes and places are right, whatever the size. What is
wrong is told at once, by kind, with the first few names of each: a K3 has half a million tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.config import K3Config
from openk3.model.container import Entry, Span, read_header
from openk3.model.released import VISION_PREFIXES, entries

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SHOWN = 3  # names of each kind of fault


@dataclass(frozen=True)
class ModelFolder:
    """A folder that holds what its config says. Packed experts and a vision tower are known by their tensors."""

    path: Path
    config: K3Config
    hf: dict[str, Any]  # config.json as it stands
    spans: dict[str, Span]
    packed: bool
    vision: bool

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans.values())

    @property
    def shards(self) -> int:
        return len({span.path for span in self.spans.values()})


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_config(folder: Path) -> K3Config:
    """The config of a model folder. Raises ValueError saying what is wrong with it."""
    return K3Config.from_hf(read_json(folder / CONFIG))


def read_index(folder: Path) -> tuple[dict[str, str], int | None]:
    """The file of every tensor, and the bytes of all if told. Raises ValueError for an index that is something else."""
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map of file names")
    for file in set(weight_map.values()):
        if Path(file).name != file:
            raise ValueError(f"{folder / INDEX} names {file!r}, which is no file of this folder")
    metadata = index.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def open_model(folder: Path) -> ModelFolder:
    """Look at a model folder without reading a tensor.

    Raises ValueError, in one sentence: what is no model folder, what of it is absent or damaged, or all that is not
    as its config says.
    """
    hf = read_json(folder / CONFIG)
    config = K3Config.from_hf(hf)
    weight_map, total = read_index(folder)
    headers = read_headers(folder, sorted(set(weight_map.values())))
    spans: dict[str, Span] = {}
    twice = []
    for header in headers:
        twice += [name for name in header if name in spans]
        spans |= header
    packed = any(name.endswith("weight_packed") for name in spans)
    vision = any(name.startswith(VISION_PREFIXES) for name in spans)
    faults = compare(spans, entries(config, packed=packed, vision=vision))
    astray = [name for name, span in spans.items() if weight_map.get(name) != span.path.name]
    faults += group(astray, "not where the index says", lambda n: f"{n} in {spans[n].path.name}")
    faults += group(twice, "in two files")
    faults += group([n for n in weight_map if n not in spans], "in the index alone")
    found = ModelFolder(folder, config, hf, spans, packed, vision)
    if not faults and total is not None and total != found.nbytes:
        faults.append(f"the index has a total_size of {total}, the tensors have {found.nbytes} bytes")
    if faults:
        raise ValueError(f"{folder} does not hold the model its config describes: {'; '.join(faults)}")
    return found


def read_headers(folder: Path, files: Sequence[str]) -> list[dict[str, Span]]:
    """The headers of all shards. Raises ValueError naming those that are absent, or the first that is damaged."""
    absent = [file for file in files if not (folder / file).exists()]
    if absent:
        raise ValueError(f"the index of {folder} names files that are not there: {listed(absent)}")
    headers, damage = [], []
    for file in files:
        try:
            headers.append(read_header(folder / file))
        except PermissionError:
            damage.append(f"{folder / file} may not be read by this user")
        except OSError as error:
            damage.append(f"{folder / file} cannot be read: {error.strerror}")
        except ValueError as error:
            damage.append(str(error))
    if damage:
        more = f"; {len(damage) - 1} more files cannot be used either" if len(damage) > 1 else ""
        raise ValueError(damage[0] + more)
    return headers


def compare(spans: Mapping[str, Span], expected: Iterable[Entry]) -> list[str]:
    """All that is missing, unexpected, of another shape or dtype: one text for each kind."""
    wanted = {entry.name: entry for entry in expected}
    both = [(name, spans[name], entry) for name, entry in wanted.items() if name in spans]
    shapes = {n: f"{n} is {list(s.shape)}, not {list(e.shape)}" for n, s, e in both if s.shape != e.shape}
    dtypes = {n: f"{n} is {s.dtype}, not {e.dtype}" for n, s, e in both if s.dtype != e.dtype}
    faults = group([name for name in wanted if name not in spans], "missing")
    faults += group([name for name in spans if name not in wanted], "unexpected")
    faults += group(list(shapes), "of another shape", shapes.__getitem__)
    return faults + group(list(dtypes), "of another dtype", dtypes.__getitem__)


def group(names: Sequence[str], kind: str, words: Callable[[str], str] = str) -> list[str]:
    """ "12 missing (a, b, c and 9 more)", or nothing."""
    return [f"{len(names):,} {kind} ({listed([words(name) for name in names[:SHOWN]], len(names))})"] if names else []


def listed(names: Sequence[str], total: int | None = None) -> str:
    """The first few names, and how many more there are."""
    more = (len(names) if total is None else total) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")
