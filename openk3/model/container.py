"""The safetensors container: a header's length in eight bytes, the header as JSON, the tensors one after the other.

A shard of K3 has 16 GB, so both ways go a tensor at a time: writing asks for one when its turn comes, reading puts
one where it belongs. A header is believed only if it and the length of the file agree to the byte.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "I16": torch.int16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool,
}  # fmt: skip
SPELLINGS = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # the format's own limit


class Entry(NamedTuple):
    """A tensor on disk to be; `dtype` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Span(NamedTuple):
    """A tensor in a file: what it is, and where its bytes begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def entry_of(name: str, tensor: Tensor) -> Entry:
    """How a tensor goes to disk as it is. Raises ValueError for a dtype that the format lacks."""
    if tensor.dtype not in SPELLINGS:
        raise ValueError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold")
    return Entry(name, SPELLINGS[tensor.dtype], tuple(tensor.shape))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in this machine's memory; they are shared, not copied."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def write(path: Path, entries: Iterable[Entry], fetch: Callable[[Entry], Tensor]) -> int:
    """Write one file, asking `fetch` for one tensor at a time. Returns the bytes of the tensors.

    The wider dtypes stand first, so that every tensor is aligned to its own width. Raises OSError as the system gives
    it, and ValueError when `fetch` gives another shape or dtype than the header has promised.
    """
    order = sorted(entries, key=lambda entry: -DTYPES[entry.dtype].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in order:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.nbytes]}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in order:
            tensor = fetch(entry)
            if entry_of(entry.name, tensor) != entry:
                raise ValueError(f"{entry.name} was to be {entry.dtype} {list(entry.shape)}, not {tensor.dtype} "
                                 f"{list(tensor.shape)}")  # fmt: skip
            file.write(raw(tensor.detach().cpu().contiguous()))
            del tensor  # before the next one is made
    return end


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors that exist already, wherever they are, one at a time."""
    write(path, [entry_of(name, tensor) for name, tensor in tensors.items()], lambda entry: tensors[entry.name])


def read_header(path: Path) -> dict[str, Span]:
    """What a file holds, without reading any of it. Raises ValueError saying how the file is damaged, or OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{path} is damaged: it has {size} bytes, fewer than the length of a header takes")
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{path} is damaged: its header should have {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: its header is no JSON object") from None
    header.pop("__metadata__", None)
    spans = {name: span_of(path, name, described, 8 + length) for name, described in header.items()}
    check_spans(path, spans, 8 + length, size)
    return spans


def span_of(path: Path, name: str, described: object, base: int) -> Span:
    """One item of a header, its parts of the right kind and its bytes as many as its shape takes."""
    try:
        dtype, shape, (start, stop) = (described[key] for key in ("dtype", "shape", "data_offsets"))  # pyright: ignore
        width = DTYPES[dtype].itemsize
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        whole, width, shape, start, stop = False, 0, [], 0, 0
    if not whole or math.prod(shape) * width != stop - start:
        raise ValueError(f"{path} is damaged: its header does not describe {name!r} as a tensor ({described})"[:400])
    return Span(path, dtype, tuple(shape), base + start, stop - start)


def check_spans(path: Path, spans: dict[str, Span], base: int, size: int) -> None:
    """The tensors must fill the file behind its header, without a gap or an overlap. Raises ValueError."""
    end, before = base, "the header"
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if span.start != end:
            how = "overlap" if span.start < end else "leave a gap"
            raise ValueError(f"{path} is damaged: {before} and {name} {how} at byte {min(end, span.start)}")
        end, before = end + span.nbytes, name
    if size != end:
        raise ValueError(f"{path} is damaged: it has {size} bytes, {'fewer' if size < end else 'more'} than the {end} "
                         "that its header describes")  # fmt: skip


def read(span: Span, *, part: int | None = None, out: Tensor | None = None) -> Tensor:
    """A tensor of a file, or entry `part` of its first axis, in its own dtype and in this machine's memory.

    `out`, of the same shape, is filled; where its dtype and place allow, straight from the file. Returns what was read.
    Raises ValueError if the file has meanwhile lost its end.
    """
    shape, start = span.shape, span.start
    if part is not None:
        shape = shape[1:]
        start += part * (span.nbytes // span.shape[0])
    dtype = DTYPES[span.dtype]
    direct = out is not None and out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
    target = out if out is not None and direct else torch.empty(shape, dtype=dtype)
    view, done = raw(target), 0
    with open(span.path, "rb", buffering=0) as file:
        file.seek(start)
        while done < len(view):  # the system gives at most 2 GB at once
            n = file.readinto(view[done:])
            if not n:
                raise ValueError(f"{span.path} is damaged: it ends before its tensors do")
            done += n
    if out is not None and not direct:
        out.detach().copy_(target)
    return target
