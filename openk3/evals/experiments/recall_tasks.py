"""Sequences with a known answer: associative recall, and copying in order.

Ids 0 to 127 are keys (or symbols), 128 to 255 values; id 255 is a separator where a task has one. Every batch is a
pure function of its generator.

Letters: N sequences, L tokens of each, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

KEYS = 128  # ids of keys, from 0
VALUES = 127  # ids of values, from KEYS
SEPARATOR = KEYS + VALUES
NOT_ASKED = -1


class TaskBatch(NamedTuple):
    """tokens [N, L] int64; targets [N, L] int64, the answer due at a position or NOT_ASKED."""

    tokens_NL: Tensor
    targets_NL: Tensor

    @property
    def cu_seqlens(self) -> Tensor:
        """Bounds of the sequences on the flat token axis, int32 [N + 1]."""
        n, length = self.tokens_NL.shape
        return torch.arange(0, (n + 1) * length, length, dtype=torch.int32)


def recall(pairs: int, sequences: int, generator: torch.Generator) -> TaskBatch:
    """Multi-query associative recall: `pairs` key-value pairs, then every key once more, in another order.

    The answer at a repeated key is its value. Keys of a sequence are distinct, values are not. Length 3 P. Raises
    ValueError for more pairs than keys.
    """
    if not 1 <= pairs <= KEYS:
        raise ValueError(f"pairs = {pairs} must be 1 to {KEYS}, the number of keys")
    keys_NP = distinct(KEYS, pairs, sequences, generator)
    values_NP = torch.randint(KEYS, KEYS + VALUES, (sequences, pairs), generator=generator)
    order_NP = distinct(pairs, pairs, sequences, generator)
    told_NL = torch.stack([keys_NP, values_NP], dim=2).flatten(1)
    tokens_NL = torch.cat([told_NL, keys_NP.gather(1, order_NP)], dim=1)
    targets_NL = torch.cat([torch.full_like(told_NL, NOT_ASKED), values_NP.gather(1, order_NP)], dim=1)
    return TaskBatch(tokens_NL, targets_NL)


def copy(length: int, symbols: int, sequences: int, generator: torch.Generator) -> TaskBatch:
    """`length` symbols, a separator, and the same symbols again; the answer is always the next of them.

    Symbols are drawn with repeats, so a set of what was seen does not tell what comes next; only their order does.
    Length 2 `length`: the last symbol is asked for and not shown. Raises ValueError for a size that cannot be.
    """
    if not (length >= 1 and 2 <= symbols <= KEYS):
        raise ValueError(f"length = {length} must be at least 1 and symbols = {symbols} 2 to {KEYS}")
    told_NL = torch.randint(symbols, (sequences, length), generator=generator)
    separator_N1 = torch.full((sequences, 1), SEPARATOR)
    tokens_NL = torch.cat([told_NL, separator_N1, told_NL[:, :-1]], dim=1)
    targets_NL = torch.cat([torch.full_like(told_NL, NOT_ASKED), told_NL], dim=1)
    return TaskBatch(tokens_NL, targets_NL)


def distinct(of: int, n: int, rows: int, generator: torch.Generator) -> Tensor:
    """`rows` draws of `n` different numbers below `of`, int64 [rows, n]."""
    return torch.rand(rows, of, generator=generator).argsort(dim=1)[:, :n]


def accuracy(answers_NL: Tensor, batch: TaskBatch) -> float:
    """Share of the asked positions that are answered right. Raises ValueError when nothing was asked."""
    asked_NL = batch.targets_NL != NOT_ASKED
    if not asked_NL.any():
        raise ValueError("the batch asks for nothing")
    return float((answers_NL == batch.targets_NL)[asked_NL].double().mean())


Draw = Callable[[torch.Generator], TaskBatch]
