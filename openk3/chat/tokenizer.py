"""Byte-level BPE over tiktoken, with K3's pre-tokeniser and its 256 control slots.

A vocabulary is n byte-level ranks followed by 256 control ids (model.md section 15). The released rank file
has 163,584 ranks; a vocabulary trained here has fewer, and every control id moves down with it:

    id = n_ranks + (K3 id - 163584)

Ordinary text never becomes a control id. Only a segment that the caller flags may hold control strings.
"""

import base64
import binascii
import codecs
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken

K3_RANKS = 163584
NUM_CONTROL = 256

# The names of the released vocabulary by K3 id; every other slot is <|reserved_token_{id}|>.
K3_CONTROL_NAMES = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|end_of_msg|>",
    163587: "<|open|>",
    163588: "<|close|>",
    163589: "<|sep|>",
    163590: "[start_header_id]",
    163591: "[end_header_id]",
    163593: "[EOT]",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163649: "<osagent_mode>",
    163838: "[UNK]",
    163839: "[PAD]",
}

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
WORD_START = r"[^\r\n\p{L}\p{N}]?"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
ALTERNATIVES = (
    r"[\p{Han}]+",
    WORD_START + UPPER + "*" + LOWER + "+" + CONTRACTION,
    WORD_START + UPPER + "+" + LOWER + "*" + CONTRACTION,
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PATTERN = "|".join(ALTERNATIVES)

# Guards of the released tokeniser: they keep the regular-expression engine from running out of stack, and
# they are part of the definition because they change the ids of long texts.
MAX_CHARS = 400_000
MAX_RUN = 25_000
# The look-behind lets a run be tried only at its start: a run just below the limit would cost its square
# else.
LONG_RUN = re.compile(rf"(?<!\s)\s{{{MAX_RUN + 1},}}|(?<!\S)\S{{{MAX_RUN + 1},}}")


def pattern_without_intersection() -> str:
    """PATTERN for engines without the class intersection `&&`: each [X&&[^Han]] becomes (?:(?!Han)[X])."""
    return re.sub(r"\[([^\[\]]*)&&\[\^\\p\{Han\}\]\]", r"(?:(?!\\p{Han})[\1])", PATTERN)


def guarded(text: str) -> list[str]:
    """Cut text at every 400,000 characters, and inside runs of more than 25,000 (non-)white-space characters.

    A run is measured inside its 400,000-character part, as in the released tokeniser. Empty text gives no
    part.
    """
    parts = []
    for start in range(0, len(text), MAX_CHARS):
        part = text[start : start + MAX_CHARS]
        cut = 0
        if len(part) > MAX_RUN:
            for run in LONG_RUN.finditer(part):
                for end in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    parts.append(part[cut:end])
                    cut = end
        parts.append(part[cut:])
    return parts


def read_ranks(path: str | os.PathLike) -> dict[bytes, int]:
    """Read a tiktoken rank file: one base64 token and its rank a line. Returns {token bytes: rank}.

    Raises FileNotFoundError, or ValueError naming the line that is malformed, truncated or repeated. A file
    that is cut between two lines is a whole, smaller vocabulary; whoever knows the size compares n_ranks.
    """
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields and number == len(lines):
            break
        try:
            token_base64, rank_text = fields
            token, rank = base64.b64decode(token_base64, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{path}, line {number}: expected a base64 token and its rank, got {line[:60]!r}; "
                "the file is damaged or cut short"
            ) from None
        if not token or token in ranks or rank in seen or not 0 <= rank < len(lines):
            raise ValueError(
                f"{path}, line {number}: token {token!r} with rank {rank} is empty, repeated or outside "
                f"0..{len(lines) - 1}; the file is damaged or cut short"
            )
        ranks[token] = rank
        seen.add(rank)
    return ranks


def control_names(n_ranks: int) -> dict[str, int]:
    """The 256 control strings of a vocabulary with n_ranks ranks, each with its id."""
    names = {}
    for k3_id in range(K3_RANKS, K3_RANKS + NUM_CONTROL):
        own_id = n_ranks + k3_id - K3_RANKS
        names[K3_CONTROL_NAMES.get(k3_id, f"<|reserved_token_{own_id}|>")] = own_id
    return names


def check_ranks(ranks: Mapping[bytes, int]) -> None:
    """Raise ValueError unless the ranks are 0..n-1 and every single byte has one."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"a rank table needs all 256 single bytes; byte {missing[0]} is missing")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{len(ranks)} ranks must be the numbers 0..{len(ranks) - 1}, each once")


class Tokenizer:
    """Text to ids and back, for any rank table.

    ranks: the path of a tiktoken rank file, or a table {token bytes: rank}. Raises ValueError for a damaged
    file or a table without all 256 bytes, FileNotFoundError for a missing file. model.md section 15.
    """

    def __init__(self, ranks: str | os.PathLike | Mapping[bytes, int]):
        table = dict(ranks) if isinstance(ranks, Mapping) else read_ranks(ranks)
        check_ranks(table)
        self.ranks = table
        self.n_ranks = len(table)
        self.vocab_size = self.n_ranks + NUM_CONTROL
        self.control = control_names(self.n_ranks)
        self.encoding = tiktoken.Encoding("openk3", pat_str=PATTERN, mergeable_ranks=table, special_tokens=self.control)
        self.bos = self.control["[BOS]"]
        self.eos = self.control["[EOS]"]
        self.end_of_msg = self.control["<|end_of_msg|>"]
        self.open = self.control["<|open|>"]
        self.close = self.control["<|close|>"]
        self.sep = self.control["<|sep|>"]
        self.media_begin = self.control["<|media_begin|>"]
        self.media_content = self.control["<|media_content|>"]
        self.media_end = self.control["<|media_end|>"]
        self.media_pad = self.control["<|media_pad|>"]
        self.unk = self.control["[UNK]"]
        self.pad = self.control["[PAD]"]

    def __repr__(self) -> str:
        return f"Tokenizer({self.n_ranks} ranks + {NUM_CONTROL} control ids)"

    def is_control(self, token: int) -> bool:
        """Whether an id is one of the 256 control slots."""
        return self.n_ranks <= token < self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: control strings in it stay text. A lone surrogate is read as U+FFFD."""
        ids = []
        for part in guarded(text):
            ids += self.encoding.encode_ordinary(part)
        return ids

    def encode_with_control(self, text: str) -> list[int]:
        """Ids of text whose control strings become control ids: never for text of a user or a tool."""
        ids = []
        for part in guarded(text):
            ids += self.encoding.encode(part, allowed_special="all", disallowed_special=())
        return ids

    def encode_segments(self, segments: Iterable[tuple[int | bool, str]]) -> list[int]:
        """Ids of (flag, text) segments, one by one; control strings count only where the flag is set."""
        ids = []
        for flag, text in segments:
            ids += self.encode_with_control(text) if flag else self.encode(text)
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """encode as a uint32 array, [number of ids], without the detour over a list."""
        try:
            parts = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in guarded(text)]
        except UnicodeEncodeError:  # a lone surrogate, which encode replaces
            return np.array(self.encode(text), dtype=np.uint32)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def encode_batch(self, texts: Iterable[str], num_threads: int | None = None) -> list[np.ndarray]:
        """encode_array of many texts, in threads: the encoder runs outside the interpreter lock."""
        with ThreadPoolExecutor(num_threads or os.cpu_count()) as threads:
            return list(threads.map(self.encode_array, texts))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of ids; a control id gives its name. Raises ValueError for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary 0..{self.vocab_size - 1}")
        return self.encoding.decode_bytes(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; control ids give their names, bytes that are no UTF-8 give U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def token_bytes(self) -> list[int]:
        """Length in bytes of every id, [vocab_size]; a control id has no text and counts 0."""
        lengths = [0] * self.vocab_size
        for token, rank in self.ranks.items():
            lengths[rank] = len(token)
        return lengths

    def save(self, path: str | os.PathLike) -> None:
        """Write the ranks as a tiktoken file, beside the target and then renamed over it."""
        target = Path(path)
        lines = [
            base64.b64encode(token) + b" %d\n" % rank
            for token, rank in sorted(self.ranks.items(), key=lambda item: item[1])
        ]
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        beside.write_bytes(b"".join(lines))
        os.replace(beside, target)


class StreamDecoder:
    """Text of ids that arrive one at a time; the bytes of an unfinished character are held back.

    The pieces that push and flush return, joined, are Tokenizer.decode of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this id completes, possibly empty."""
        return self.utf8.decode(self.tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        """The end: U+FFFD for an unfinished character, else nothing. The decoder starts afresh."""
        rest = self.utf8.decode(b"", final=True)
        self.utf8.reset()
        return rest
