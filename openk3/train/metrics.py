"""metrics.jsonl: one JSON object a line, each with "kind", "step" and "tokens".

A resumed run first cuts the lines behind its checkpoint, so that the file becomes the one an unbroken run would have
written, but for the fields of TIMING. With TensorBoard installed the curves go there too.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

TIMING = ("tok_per_s", "seconds")
CURVES = {
    "train": ("loss", "bpb", "lr", "grad_norm", "tok_per_s", "maxvio", "dead", "clipped_heads"),
    "eval": ("loss", "bpb"),
}


def cut_after(path: Path, step: int) -> None:
    """Cut the file before its first line that is torn or belongs to a later step than `step`.

    One truncation, so a kill leaves either the old file or the new one.
    """
    if not path.exists():
        return
    keep = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n") or not belongs(line, step):
                break
            keep += len(line)
    if keep < path.stat().st_size:
        os.truncate(path, keep)


def belongs(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


class Metrics:
    """The open file of a run that stands at `step`; lines of later steps are cut first."""

    def __init__(self, path: Path, step: int, curves: Path | None = None):
        cut_after(path, step)
        self.handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.board = tensorboard(curves, step) if curves else None

    def write(self, kind: str, step: int, tokens: int, **values: Any) -> None:
        """Append one line; it has left the process when this returns."""
        record = {"kind": kind, "step": step, "tokens": tokens, **values}
        line = memoryview(json.dumps(record, allow_nan=False).encode() + b"\n")
        while line:
            line = line[os.write(self.handle, line) :]
        if self.board:
            for name in CURVES.get(kind, ()):
                if name in values:
                    worst = max(values[name], default=0) if isinstance(values[name], list) else values[name]
                    self.board.add_scalar(f"{kind}/{name}", worst, step)

    def sync(self) -> None:
        """Make the lines durable: a checkpoint must not outlive them."""
        os.fsync(self.handle)
        if self.board:
            self.board.flush()

    def close(self) -> None:
        os.close(self.handle)
        if self.board:
            self.board.close()


def tensorboard(folder: Path, step: int) -> Any:
    """A TensorBoard writer that hides what an earlier process wrote behind `step`; None when it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=step + 1)
