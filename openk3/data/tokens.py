"""A corpus as token ids on disk: trained vocabulary, training ids, held-out ids.

A document is [BOS] text [EOS] (decisions.md). Everything stands in one folder of the cache, under a key made
of the corpus hash, the vocabulary and the version of the pre-tokeniser. The folder is written beside its
place and renamed, so a kill leaves no half cache; sizes and checksums tell a damaged one, which is built
anew.
"""

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from openk3.chat.tokenizer import MAX_CHARS, MAX_RUN, PATTERN, Tokenizer
from openk3.data.bpe import train_bpe
from openk3.data.sources import HELD_OUT_FRACTION, Document, corpus_hash, split

# Raise it when the content of a cache folder changes for the same corpus and vocabulary.
FORMAT_VERSION = 1
ENCODE_CHUNK = 256
STALE_SECONDS = 24 * 3600
TOKENIZER_FILE, META_FILE = "tokenizer.model", "meta.json"

# progress(stage, done, total): called while documents are encoded.
Progress = Callable[[str, int, int], None]


class TokenArray(NamedTuple):
    """Documents one after the other. tokens [T] uint16 or uint32; offsets [N+1] int64, document n is
    tokens[offsets[n] : offsets[n + 1]]."""

    tokens: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Prepared:
    """What a run needs of a corpus, and the numbers that are printed beside its figures."""

    tokenizer: Tokenizer
    train: TokenArray
    held_out: TokenArray
    corpus_hash: str
    files: int
    bytes: int
    held_out_files: int
    held_out_bytes: int


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 when every id fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def encode_corpus(
    corpus: Sequence[Document], tokenizer: Tokenizer, progress: Progress | None = None, stage: str = "encode"
) -> TokenArray:
    """[BOS] text [EOS] of every document, in order."""
    dtype = token_dtype(tokenizer.vocab_size)
    pieces, lengths = [], [0]
    for start in range(0, len(corpus), ENCODE_CHUNK):
        chunk = corpus[start : start + ENCODE_CHUNK]
        for ids in tokenizer.encode_batch(document.text for document in chunk):
            pieces.append(np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(dtype))
            lengths.append(len(ids) + 2)
        if progress:
            progress(stage, min(start + ENCODE_CHUNK, len(corpus)), len(corpus))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype)
    return TokenArray(tokens, np.cumsum(lengths, dtype=np.int64))


def text_bytes(corpus: Sequence[Document]) -> int:
    """UTF-8 bytes of all texts."""
    return sum(len(document.text.encode()) for document in corpus)


def cache_key(digest: str, n_ranks: int, tokenizer: Tokenizer | None = None) -> str:
    """Name of the cache folder: what decides the ids, hashed, behind a part that people can read."""
    own = sorted(tokenizer.ranks.items(), key=lambda item: item[1]) if tokenizer else None
    parts = (FORMAT_VERSION, digest, n_ranks, HELD_OUT_FRACTION, PATTERN, MAX_CHARS, MAX_RUN, own)
    return f"{digest[:8]}-{n_ranks}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def prepare(
    corpus: Sequence[Document],
    n_ranks: int,
    cache_folder: str | os.PathLike,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Split a corpus, train a vocabulary on the training side, encode both; or find all that in the cache.

    tokenizer: a finished vocabulary to use instead of training one. The arrays are memory maps of the cache.
    Raises ValueError when the corpus is too small for n_ranks or for a split, or n_ranks is not the
    tokenizer's.
    """
    if tokenizer is not None and tokenizer.n_ranks != n_ranks:
        raise ValueError(f"n_ranks is {n_ranks}, but the tokenizer given has {tokenizer.n_ranks}")
    digest = corpus_hash(corpus)
    folder = Path(cache_folder) / cache_key(digest, n_ranks, tokenizer)
    found = read_cache(folder)
    if found is None:
        try:
            build_cache(folder, corpus, digest, n_ranks, tokenizer, progress)
        except OSError:  # a full disk, say: what did not fit must not go on filling it
            shutil.rmtree(part_of(folder), ignore_errors=True)
            raise
        found = read_cache(folder)
        if found is None:
            raise OSError(f"{folder} was written but does not read back whole; is the disk full?")
    return found


def part_of(folder: Path) -> Path:
    """Where this process writes a cache folder before it is renamed."""
    return folder.with_name(f".{folder.name}.{os.getpid()}.part")


def build_cache(
    folder: Path,
    corpus: Sequence[Document],
    digest: str,
    n_ranks: int,
    tokenizer: Tokenizer | None,
    progress: Progress | None,
) -> None:
    """Write a cache folder beside its place, then rename it."""
    train, held_out = split(corpus)
    if tokenizer is None:
        if progress:
            progress("train the vocabulary", 0, 1)
        tokenizer = Tokenizer(train_bpe((document.text for document in train), n_ranks))
        if progress:
            progress("train the vocabulary", 1, 1)
    beside = part_of(folder)
    sweep(folder)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tokenizer.save(beside / TOKENIZER_FILE)
    for name, side in (("train", train), ("held_out", held_out)):
        array = encode_corpus(side, tokenizer, progress, stage=f"encode {name.replace('_', '-')}")
        np.save(beside / f"{name}_tokens.npy", array.tokens)
        np.save(beside / f"{name}_offsets.npy", array.offsets)
    counts = {
        "corpus_hash": digest,
        "files": len(corpus),
        "bytes": text_bytes(corpus),
        "held_out_files": len(held_out),
        "held_out_bytes": text_bytes(held_out),
    }
    files = {path.name: checksum(path) for path in sorted(beside.iterdir())}
    (beside / META_FILE).write_text(json.dumps({"counts": counts, "files": files}, indent=1))
    replace_folder(beside, folder)


def read_cache(folder: Path) -> Prepared | None:
    """The content of a cache folder, or None when it is absent or damaged."""
    try:
        meta = json.loads((folder / META_FILE).read_text())
        counts, files = meta["counts"], meta["files"]
        if any(checksum(folder / name) != expected for name, expected in files.items()):
            return None
        train, held_out = (
            TokenArray(np.load(folder / f"{name}_tokens.npy", mmap_mode="r"), np.load(folder / f"{name}_offsets.npy"))
            for name in ("train", "held_out")
        )
        return Prepared(Tokenizer(folder / TOKENIZER_FILE), train, held_out, **counts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checksum(path: Path) -> str:
    """Size and CRC-32 of a file: enough to notice a cut or a flipped bit."""
    crc = size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return f"{size}-{crc:08x}"


def replace_folder(beside: Path, folder: Path) -> None:
    """Put beside in folder's place; a damaged folder there goes, a whole one of another process stays."""
    if folder.exists() and read_cache(folder) is None:
        shutil.rmtree(folder)
    try:
        os.rename(beside, folder)
    except OSError:
        if read_cache(folder) is None:
            raise
        shutil.rmtree(beside)


def sweep(folder: Path) -> None:
    """Remove what killed builds of this folder left, once it is too old to belong to a running one."""
    for part in folder.parent.glob(f".{folder.name}.*.part"):
        with suppress(FileNotFoundError):  # another process swept it in between
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(part, ignore_errors=True)
