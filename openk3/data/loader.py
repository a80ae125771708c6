"""Batches for training and evaluation: whole documents as pieces on one flat token axis.

A document of M tokens gives M-1 (input, target) pairs, cut on a grid of `context` into pieces. Every piece
starts from zero state and is a sequence of its own in cu_seqlens, the only place where documents are visible:
all targets are real, there is no padding and no ignored label.

T tokens, N pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Batch(NamedTuple):
    """tokens_T, targets_T int64; cu_seqlens int32 [N+1]; n_bytes: UTF-8 bytes of the targets, where control
    ids count 0; bytes_T int64: the same for each target."""

    tokens_T: Tensor
    targets_T: Tensor
    cu_seqlens: Tensor
    n_bytes: int
    bytes_T: Tensor | None = None


def document_order(n_documents: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the documents that depends on its arguments alone.

    From raw generator bits, which numpy keeps the same between versions; of its permutation it does not
    promise that.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n_documents)
    return np.argsort(bits, kind="stable")


# (seed, epoch) -> the documents of an epoch in the order they are visited.
Order = Callable[[int, int], np.ndarray]


class Packer:
    """The arrays that batches are cut from. Raises ValueError when they do not fit together.

    tokens [T] of any unsigned kind, offsets [N+1], token_bytes [vocab_size]: bytes of text of each id.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, token_bytes: Sequence[int]):
        self.tokens = tokens
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.token_bytes = np.asarray(token_bytes, dtype=np.int64)
        if self.offsets[0] != 0 or self.offsets[-1] != len(tokens) or (np.diff(self.offsets) < 0).any():
            raise ValueError(
                f"document offsets must rise from 0 to {len(tokens)}, the number of tokens; "
                f"got {self.offsets[0]} to {self.offsets[-1]}"
            )
        self.pairs = np.maximum(np.diff(self.offsets) - 1, 0)
        if not self.pairs.any():
            raise ValueError(f"{len(self.pairs)} documents hold no two tokens in a row: nothing to predict")

    def pack(self, pieces: Sequence[tuple[int, int]]) -> Batch:
        """The batch of pieces (first input position, number of pairs)."""
        total = sum(length for _, length in pieces)
        tokens, targets = np.empty(total, np.int64), np.empty(total, np.int64)
        ends = np.zeros(len(pieces) + 1, np.int32)
        for i, (start, length) in enumerate(pieces):
            ends[i + 1] = ends[i] + length
            tokens[ends[i] : ends[i + 1]] = self.tokens[start : start + length]
            targets[ends[i] : ends[i + 1]] = self.tokens[start + 1 : start + length + 1]
        lengths = self.token_bytes[targets]
        tensor = torch.from_numpy
        return Batch(tensor(tokens), tensor(targets), tensor(ends), int(lengths.sum()), tensor(lengths))


def check_positive(**values: int) -> None:
    """Raise ValueError naming the first value that is not a positive int."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")


class Loader:
    """Endless batches of exactly batch_tokens pairs.

    Each epoch visits every pair once, the documents in a fresh order drawn from (seed, epoch); a `mix` puts an
    order of its own in place of it. A piece that does not fit at the end of a batch is cut; its rest opens the
    next batch as a piece of its own. tokens [T], offsets [N+1] as in tokens.TokenArray; token_bytes
    [vocab_size]. The state is a few ints; a loader that is set back to it gives the same batches, bit for bit.
    Another batch_tokens or context may go on from a state (`context` may be set at any time), other data or
    another seed may not.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        *,
        batch_tokens: int,
        context: int,
        seed: int,
        token_bytes: Sequence[int],
        mix: Order | None = None,
    ):
        check_positive(batch_tokens=batch_tokens, context=context)
        self.packer = Packer(tokens, offsets, token_bytes)
        self.batch_tokens, self.context, self.seed = batch_tokens, context, seed
        self.epoch = self.index = self.offset = 0
        self.mix, self.mixed = mix, False
        self.order = self.draw()

    def draw(self) -> np.ndarray:
        """The documents of this epoch in the order they are visited."""
        if self.mixed and self.mix:
            return self.mix(self.seed, self.epoch)
        return document_order(len(self.packer.pairs), self.seed, self.epoch)

    def start_mix(self) -> None:
        """From the next batch on follow `mix`, in a fresh epoch; nothing when it is followed already.

        What was left of the old epoch is not visited: its order says nothing about the new one. Raises ValueError
        without a mix.
        """
        if self.mix is None:
            raise ValueError("a loader without a mix has only the order of its documents")
        if not self.mixed:
            fresh = bool(self.epoch or self.index or self.offset)
            self.mixed, self.epoch, self.index, self.offset = True, self.epoch + fresh, 0, 0
            self.order = self.draw()

    def next(self) -> Batch:
        """The next batch."""
        pieces, room = [], self.batch_tokens
        while room:
            document = self.order[self.index]
            left = int(self.packer.pairs[document]) - self.offset
            # To the next line of the grid, so that a cut at a batch end does not shift the pieces behind it.
            length = min(self.context - self.offset % self.context, left, room)
            if length:
                pieces.append((int(self.packer.offsets[document]) + self.offset, length))
                room -= length
                self.offset += length
            if length == left:
                self.advance()
        return self.packer.pack(pieces)

    def advance(self) -> None:
        """Go to the start of the next document, or of the next epoch."""
        self.index, self.offset = self.index + 1, 0
        if self.index == len(self.order):
            self.index, self.epoch = 0, self.epoch + 1
            self.order = self.draw()

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins, and what the position is worth only together with."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "offset": self.offset,
            "seed": self.seed,
            "documents": len(self.packer.pairs),
            "tokens": len(self.packer.tokens),
            "mixed": int(self.mixed),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved position. Raises ValueError when it belongs to other data or another seed."""
        own = self.state_dict()
        for name in ("seed", "documents", "tokens"):
            if state[name] != own[name]:
                raise ValueError(f"the loader state is for {name} {state[name]}, this loader has {own[name]}")
        if state.get("mixed") and self.mix is None:
            raise ValueError("the loader state is of a mix, this loader has none")
        self.epoch, self.index, self.offset = state["epoch"], state["index"], state["offset"]
        self.mixed = bool(state.get("mixed"))
        self.order = self.draw()


def micro_batches(batch: Batch, micro_tokens: int) -> Iterator[Batch]:
    """Split a batch into parts of at most micro_tokens, in order; their n_bytes add up to the batch's.

    A part ends where a piece ends, so sequences stay whole and the summed gradient is the batch's. Only a
    piece longer than micro_tokens is cut, and its rest starts from zero state: choose micro_tokens >= context
    to avoid it.
    """
    check_positive(micro_tokens=micro_tokens)
    if len(batch.tokens_T) <= micro_tokens:
        yield batch
        return
    if batch.bytes_T is None:
        raise ValueError("a batch without bytes_T cannot be split: the bytes of its parts are unknown")
    ends = batch.cu_seqlens.tolist()
    start, piece = 0, 1
    while start < ends[-1]:
        stop, cuts = start, [0]
        while piece < len(ends) and ends[piece] - start <= micro_tokens:
            stop = ends[piece]
            cuts.append(stop - start)
            piece += 1
        if stop == start:  # a piece that is longer than a whole part
            stop = start + micro_tokens
            cuts.append(micro_tokens)
        part = slice(start, stop)
        yield Batch(
            batch.tokens_T[part],
            batch.targets_T[part],
            torch.tensor(cuts, dtype=torch.int32, device=batch.cu_seqlens.device),
            int(batch.bytes_T[part].sum()),
            batch.bytes_T[part],
        )
        start = stop


def eval_batches(
    tokens: np.ndarray,
    offsets: np.ndarray,
    *,
    context: int,
    batch_tokens: int,
    token_bytes: Sequence[int],
    max_tokens: int | None = None,
) -> Iterator[Batch]:
    """Every pair once, in batches of whole pieces; with max_tokens, only so many, from a fixed shuffle.

    No piece is cut at a batch end, so the figure does not depend on batch_tokens: a batch holds at most
    max(batch_tokens, context) tokens. The fixed order spreads a small max_tokens over the whole held-out
    side.
    """
    packer = Packer(tokens, offsets, token_bytes)
    room = int(packer.pairs.sum()) if max_tokens is None else max_tokens
    check_positive(batch_tokens=batch_tokens, context=context, max_tokens=room)
    pieces, filled = [], 0
    for document in document_order(len(packer.pairs), seed=0, epoch=0):
        for start in range(0, int(packer.pairs[document]), context):
            length = min(context, int(packer.pairs[document]) - start, room)
            if pieces and filled + length > batch_tokens:
                yield packer.pack(pieces)
                pieces, filled = [], 0
            if length > 0:
                pieces.append((int(packer.offsets[document]) + start, length))
                filled, room = filled + length, room - length
    if pieces:
        yield packer.pack(pieces)
