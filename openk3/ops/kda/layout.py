"""Where the tokens of ragged sequences go when they are cut into chunks of equal length.

Legend: T tokens, N sequences, H heads, C tokens of a chunk, m chunks in all, K or V channels.

The chunks are ordered by time, not by sequence: first the first chunk of every sequence, then the second chunk of
every sequence that has one, and so on, the longest sequence leading. The serial part of the chunk form then works
on contiguous slices, all sequences and heads at once, without padding short sequences to long ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Index tables between the flat token axis [T*H] and chunks [m*H, C]; and between chunks and their states.

    States stand in one buffer [N + m, H, K, V]: first the initial states, longest sequence first, then the state
    after every chunk. So the states after the chunks of one step lie just before the next step reads them.
    """

    chunk: int
    heads: int
    chunks: int
    rows: Tensor  # [m*H*C] row of [T*H]; padding reads row 0
    padding: Tensor  # positions of [m*H*C] that hold no token
    inverse: Tensor  # [T*H] position in [m*H*C]
    steps: tuple[int, ...]  # chunks of each step, one a sequence
    order: Tensor  # [N] sequences, longest first
    enter: Tensor | None  # [m] state each chunk starts from; None when that is 0 .. m-1
    final: Tensor  # [N] state each sequence ends with
    cuts: Tensor  # [n] state at each requested offset

    def gather(self, x: Tensor) -> Tensor:
        """[T, H, c] -> [m*H, C, c]; padding is zero."""
        out = x.reshape(-1, x.shape[-1]).index_select(0, self.rows)
        if self.padding.numel():
            out.index_fill_(0, self.padding, 0)
        return out.view(self.chunks * self.heads, self.chunk, x.shape[-1])

    def scatter(self, x: Tensor) -> Tensor:
        """[m*H, C, c] -> [T, H, c]."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.inverse).view(-1, self.heads, x.shape[-1])

    def by_step(self, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Tensors [m*H, ...] cut into the steps of the serial pass; None stays None."""
        sizes = [n * self.heads for n in self.steps]
        columns = (repeat(None, len(sizes)) if x is None else x.split(sizes) for x in tensors)
        return zip(*columns, strict=True)


@lru_cache(maxsize=4)
def build_layout(
    bounds: tuple[int, ...], offsets: tuple[int, ...], chunk: int, heads: int, device: torch.device
) -> Layout:
    """Cut the sequences between `bounds` into chunks; the grid starts anew at every bound and every offset.

    Cached: the layers of a model, and forward and backward, ask for the same one.
    """
    starts, lengths, last_chunk = [], [], {}
    for i, (begin, end) in enumerate(pairwise(bounds)):
        cuts = sorted({begin, end, *(o for o in offsets if begin < o < end)})
        firsts = [(a, min(chunk, stop - a)) for start, stop in pairwise(cuts) for a in range(start, stop, chunk)]
        starts.append([a for a, _ in firsts])
        lengths.append([n for _, n in firsts])
        last_chunk.update({a + n: (i, c) for c, (a, n) in enumerate(firsts)})

    n_seq = len(starts)
    order = sorted(range(n_seq), key=lambda i: -len(starts[i]))
    counts = [len(starts[i]) for i in order]
    rank = {i: r for r, i in enumerate(order)}
    steps = [sum(1 for n in counts if n > c) for c in range(counts[0] if counts else 0)]
    first = list(accumulate(steps, initial=0))  # the number of the first chunk of each step
    chunks = first[-1]

    def state_after(i: int, c: int) -> int:
        return rank[i] if c < 0 else n_seq + first[c] + rank[i]

    def as_index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    chunk_start = as_index([starts[order[r]][c] for c, n in enumerate(steps) for r in range(n)])
    chunk_length = as_index([lengths[order[r]][c] for c, n in enumerate(steps) for r in range(n)])
    enter = [state_after(order[r], c - 1) for c, n in enumerate(steps) for r in range(n)]

    token = torch.arange(chunk)
    row = (chunk_start[:, None, None] + token) * heads + torch.arange(heads)[:, None]
    real = (token < chunk_length[:, None, None]).expand(chunks, heads, chunk).reshape(-1)
    row = row.reshape(-1).masked_fill(~real, 0)
    inverse = torch.empty(bounds[-1] * heads, dtype=torch.int64)
    inverse[row[real]] = real.nonzero().flatten()
    return Layout(
        chunk=chunk,
        heads=heads,
        chunks=chunks,
        rows=row.to(device),
        padding=(~real).nonzero().flatten().to(device),
        inverse=inverse.to(device),
        steps=tuple(steps),
        order=as_index(order).to(device),
        enter=None if enter == list(range(chunks)) else as_index(enter).to(device),
        final=as_index([state_after(i, len(starts[i]) - 1) for i in range(n_seq)]).to(device),
        cuts=as_index([state_after(*last_chunk[o]) for o in offsets]).to(device),
    )
