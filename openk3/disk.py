"""Writing so that a kill, or a full disk, at any byte leaves what was there before."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openk3.errors import Failure

PARTIAL = ".partial"  # ending of what is being written beside its place


def partial_sibling(path: Path) -> Path:
    """Where `path` is written before it is renamed: hidden, and on the same file system."""
    return path.with_name(f".{path.name}{PARTIAL}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make everything below a folder durable, files first."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open(Path(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder` by filling a sibling, syncing and renaming it. If `fill` raises, nothing is left behind."""
    beside = partial_sibling(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove(beside)
    try:
        beside.mkdir()
        fill(beside)
        sync_tree(beside)
        os.rename(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def write_file(path: Path, content: str) -> None:
    """Put a text file in place in one step."""
    beside = partial_sibling(path)
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that a kill on the way leaves a half-written sibling, not a damaged folder."""
    beside = partial_sibling(folder)
    remove(beside)
    os.rename(folder, beside)
    shutil.rmtree(beside)


def sweep(folder: Path) -> None:
    """Remove what killed writers left half-written in a folder."""
    for path in folder.glob(f".*{PARTIAL}"):
        remove(path)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that the disk, the quota or the largest file allowed is full; safetensors reports the
    code in its text, and NumPy nothing but how much of an array went in."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in full:
        return True
    if re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        return True
    told = re.search(r"\bcode: (\d+)|os error (\d+)", str(error))
    return told is not None and int(told[1] or told[2]) in full


@contextmanager
def disk_full_is_failure(folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Turn "no space left" from inside into one sentence, a Failure."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise Failure(f"the disk of {folder} is full: {advice()}") from error
