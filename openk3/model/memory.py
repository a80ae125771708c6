"""What a sequence remembers, and where it stands.

A sequence has two memories that must agree: per MLA layer one row [latent | shared key part] a token, and per KDA
layer one recurrent state and one convolution tail *at* a position. Both move together: a slot has one length.

Layers see them through two views, `KDAView` (states and tails by slot) and `KVView` (pages by table), and do not know
who owns them. `Memory` owns them contiguously, one page a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from openk3.config import K3Config
from openk3.model.sizes import memory_sizes
from openk3.ops.mla import KVView


@dataclass(frozen=True)
class Sequences:
    """The sequences in one flat batch: `cu_seqlens` int32 [N + 1] and each token's position in its sequence [T]."""

    cu_seqlens: Tensor
    positions_T: Tensor
    one_token_each: bool

    @classmethod
    def of(cls, n_tokens: int, cu_seqlens: Tensor, starts_N: Tensor | None = None) -> Sequences:
        """Sequences that begin at `starts_N` (0 without). Raises ValueError if they do not cover the tokens."""
        lengths_N = cu_seqlens.diff()
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens[0] != 0 or (lengths_N < 0).any():
            raise ValueError(f"cu_seqlens must rise from 0, not {cu_seqlens.tolist()[:8]}")
        if cu_seqlens[-1] != n_tokens:
            raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, but there are {n_tokens} tokens")
        first_N = cu_seqlens[:-1] if starts_N is None else cu_seqlens[:-1] - starts_N
        offset_T = torch.repeat_interleave(first_N.long(), lengths_N.long(), output_size=n_tokens)
        positions_T = torch.arange(n_tokens, device=cu_seqlens.device) - offset_T
        return cls(cu_seqlens, positions_T, bool((lengths_N == 1).all()))


Advance = Callable[..., Tensor]


@dataclass
class KDAView:
    """One KDA layer's share: states [S, H, K, V] float32, tails [S, W - 1, C], and the slot of each sequence [N]."""

    states: Tensor
    tails: Tensor
    slots: Tensor
    kept: list | None  # while tokens are speculative: what it takes to replay them

    def keep(self, advance: Advance, inputs: tuple[Tensor, ...], sequences: Sequences) -> None:
        """Remember a layer's projected inputs, should only some of the tokens be accepted."""
        if self.kept is not None:
            self.kept.append((advance, inputs, sequences.cu_seqlens))


class Memory:
    """Memory of `slots` sequences of at most `capacity` tokens each, contiguous. One length a slot.

    A call of the model advances the slots chosen by `use`. Speculative tokens go between `begin` and `commit`.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        slots: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.config, self.capacity, self.dtype = config, capacity, dtype
        state_dtype = torch.promote_types(dtype, torch.float32)
        self.sizes = sizes = memory_sizes(config, state_dtype=state_dtype, window_dtype=dtype, row_dtype=dtype)
        self.states: dict[int, Tensor] = {}
        self.tails: dict[int, Tensor] = {}
        self.pools: dict[int, Tensor] = {}
        for i, kind in enumerate(config.layer_kinds):
            if kind == "kda":
                self.states[i] = torch.zeros(slots, *sizes.state_shape, dtype=state_dtype, device=device)
                self.tails[i] = torch.zeros(slots, *sizes.window_shape, dtype=dtype, device=device)
            else:
                self.pools[i] = torch.zeros(slots, capacity, sizes.row_width, dtype=dtype, device=device)
        self.lengths_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.slots_N = torch.arange(slots, device=device)
        self._held: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._kept: dict[int, list] | None = None

    # ---- what the model sees

    def use(self, slots: list[int] | Tensor) -> Memory:
        """Choose the slots, in order, of the sequences in the next call."""
        self.slots_N = torch.as_tensor(slots, dtype=torch.int64, device=self.lengths_S.device)
        return self

    @property
    def starts_N(self) -> Tensor:
        return self.lengths_S[self.slots_N]

    def kda(self, layer: int) -> KDAView:
        kept = None if self._kept is None else self._kept.setdefault(layer, [])
        return KDAView(self.states[layer], self.tails[layer], self.slots_N, kept)

    def kv(self, layer: int) -> KVView:
        return KVView(self.pools[layer], self.slots_N[:, None], self.starts_N)

    def check_room(self, cu_seqlens: Tensor) -> None:
        """Raises ValueError if the sequences of a call do not match the slots or outgrow their capacity."""
        lengths_N = cu_seqlens.diff()
        if len(lengths_N) != len(self.slots_N):
            raise ValueError(f"{len(lengths_N)} sequences for {len(self.slots_N)} memory slots")
        longest = int((self.starts_N + lengths_N).max()) if len(lengths_N) else 0
        if longest > self.capacity:
            raise ValueError(f"a sequence of {longest} tokens exceeds the memory's capacity of {self.capacity}")

    def advance(self, cu_seqlens: Tensor) -> None:
        """Called by the model once all layers have taken the tokens."""
        self.lengths_S[self.slots_N] += cu_seqlens.diff().to(torch.int32)

    # ---- speculative tokens

    def begin(self) -> None:
        """Tokens from now on are speculative, until `commit` or `rollback`."""
        if self._kept is not None:
            raise ValueError("begin was called twice without a commit or rollback between")
        self._kept = {}
        self._before = (self.slots_N.clone(), self.starts_N.clone(), self._snapshot(self.slots_N))

    def commit(self, accepted_N: Tensor | list[int]) -> None:
        """Keep the first `accepted_N` speculative tokens of each slot: states are replayed from the inputs kept."""
        kept, before = self._kept, self._before
        if kept is None:
            raise ValueError("commit was called without begin")
        slots_N, starts_N, snapshot = before
        taken_N = (self.lengths_S[slots_N] - starts_N).tolist()
        accepted = [int(a) for a in accepted_N]
        if len(accepted) != len(taken_N) or any(not 0 <= a <= t for a, t in zip(accepted, taken_N, strict=True)):
            raise ValueError(f"accepted {accepted} of {taken_N} speculative tokens")
        self._kept = None
        self._restore(slots_N, snapshot)
        for inputs in kept.values():
            self._replay(inputs, slots_N, accepted)
        self.lengths_S[slots_N] = starts_N + torch.tensor(accepted, dtype=torch.int32, device=starts_N.device)

    def rollback(self) -> None:
        """Drop all speculative tokens."""
        if self._kept is None:
            raise ValueError("rollback was called without begin")
        self.commit([0] * len(self._before[0]))

    def _replay(self, calls: list, slots_N: Tensor, accepted: list[int]) -> None:
        """Run one KDA layer's kept inputs again, as many tokens of each sequence as were accepted."""
        left = list(accepted)
        for advance, inputs, cu in calls:
            spans = list(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True))
            take = [min(n, stop - start) for n, (start, stop) in zip(left, spans, strict=True)]
            left = [n - t for n, t in zip(left, take, strict=True)]
            rows = torch.cat([torch.arange(s, s + t) for (s, _), t in zip(spans, take, strict=True)]).to(cu.device)
            cu_taken = torch.tensor([0, *take], dtype=torch.int32, device=cu.device).cumsum(0, dtype=torch.int32)
            advance(*(x[rows] for x in inputs), Sequences.of(len(rows), cu_taken))

    # ---- copies, checkpoints, bytes

    def _snapshot(self, slots: Tensor) -> dict[str, Tensor]:
        named = {f"state.{i}": t for i, t in self.states.items()} | {f"tail.{i}": t for i, t in self.tails.items()}
        return {name: t[slots].clone() for name, t in named.items()}

    def _restore(self, slots: Tensor, snapshot: dict[str, Tensor]) -> None:
        for i in self.states:
            self.states[i][slots] = snapshot[f"state.{i}"]
            self.tails[i][slots] = snapshot[f"tail.{i}"]

    def hold(self, slot: int) -> int:
        """Hold a checkpoint of the KDA memory at the slot's present position; returns the position."""
        position = int(self.lengths_S[slot])
        self._held[slot, position] = self._snapshot(torch.tensor([slot]))
        return position

    def truncate(self, slot: int, position: int) -> None:
        """Go back to `position`. Raises ValueError unless it is 0 or a checkpoint was held there."""
        if position > int(self.lengths_S[slot]):
            raise ValueError(f"slot {slot} holds {int(self.lengths_S[slot])} tokens, not {position}")
        if position == 0:
            for t in (*self.states.values(), *self.tails.values()):
                t[slot].zero_()
        elif (slot, position) in self._held:
            self._restore(torch.tensor([slot]), self._held[slot, position])
        elif position != int(self.lengths_S[slot]):
            held = sorted(p for s, p in self._held if s == slot)
            raise ValueError(f"slot {slot} holds no checkpoint at {position}; it holds {held}")
        self.lengths_S[slot] = position
        self._held = {k: v for k, v in self._held.items() if k[0] != slot or 0 < k[1] <= position}

    def clone_slot(self, source: int, target: int) -> None:
        """Copy one sequence's whole memory into another slot."""
        self.write(target, self.read(source))

    def read(self, slot: int) -> dict[str, Tensor]:
        """One sequence's memory as tensors: states and tails at its length, rows of its tokens."""
        length = int(self.lengths_S[slot])
        rows = {f"rows.{i}": pool[slot, :length].clone() for i, pool in self.pools.items()}
        snapshot = {name: t[0] for name, t in self._snapshot(torch.tensor([slot])).items()}
        return {"length": torch.tensor(length)} | snapshot | rows

    def write(self, slot: int, tensors: dict[str, Tensor]) -> None:
        """Put into `slot` what `read` gave. Raises ValueError if it does not fit."""
        length = int(tensors["length"])
        if length > self.capacity:
            raise ValueError(f"a sequence of {length} tokens exceeds the memory's capacity of {self.capacity}")
        for i in self.states:
            self.states[i][slot] = tensors[f"state.{i}"]
            self.tails[i][slot] = tensors[f"tail.{i}"]
        for i, pool in self.pools.items():
            pool[slot, :length] = tensors[f"rows.{i}"]
        self.lengths_S[slot] = length
        self._held = {k: v for k, v in self._held.items() if k[0] != slot}

    def to_bytes(self, slot: int) -> bytes:
        return save({name: t.contiguous() for name, t in self.read(slot).items()})

    def from_bytes(self, slot: int, data: bytes) -> None:
        self.write(slot, load(data))

    def nbytes(self, slot: int) -> int:
        """Bytes one sequence occupies: constant for KDA, a row a token for MLA."""
        return self.sizes.sequence(int(self.lengths_S[slot]))
