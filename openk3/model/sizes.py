"""What sequences cost in memory: the one place where shapes and bytes of states, windows and cache rows come from.

Whoever allocates, admits, copies or counts asks here (serving.md section 1), so that no two of them can disagree.
Short chats are bound by the KDA state, which is there from the first token on; long ones by the MLA rows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from openk3.config import K3Config


@dataclass(frozen=True)
class MemorySizes:
    """Shapes of one sequence in one layer, and their bytes. H heads, K = V widths, W taps, C channels of q, k and v.

    state [H, K, V], window [W - 1 + drafts, C] in each KDA layer; a row [kv_lora_rank + qk_rope_head_dim] a token in
    each MLA layer.
    """

    state_shape: tuple[int, int, int]
    window_shape: tuple[int, int]
    row_width: int
    kda_layers: int
    mla_layers: int
    state_dtype: torch.dtype
    window_dtype: torch.dtype
    row_dtype: torch.dtype

    @property
    def state(self) -> int:
        """Bytes of the recurrent state, one layer."""
        return math.prod(self.state_shape) * self.state_dtype.itemsize

    @property
    def window(self) -> int:
        """Bytes of the convolution's inputs, one layer."""
        return math.prod(self.window_shape) * self.window_dtype.itemsize

    @property
    def kda_layer(self) -> int:
        return self.state + self.window

    @property
    def kda(self) -> int:
        """Bytes of one sequence in all KDA layers, whatever its length."""
        return self.kda_layers * self.kda_layer

    @property
    def row(self) -> int:
        """Bytes of one token in one MLA layer."""
        return self.row_width * self.row_dtype.itemsize

    @property
    def token(self) -> int:
        """Bytes of one token in all MLA layers."""
        return self.mla_layers * self.row

    @property
    def token_all_mla(self) -> int:
        """Bytes of one token if every layer were MLA."""
        return (self.kda_layers + self.mla_layers) * self.row

    def sequence(self, tokens: int) -> int:
        """Bytes of one sequence of so many tokens."""
        return self.kda + tokens * self.token

    @property
    def even_at(self) -> float:
        """Tokens at which a sequence's MLA rows weigh as much as its KDA memory; infinite without MLA layers."""
        return self.kda / self.token if self.token else math.inf

    @property
    def rows_a_state(self) -> float:
        """Rows of one MLA layer that weigh as much as one KDA layer's memory."""
        return self.kda_layer / self.row


def memory_sizes(
    config: K3Config,
    *,
    state_dtype: torch.dtype = torch.float32,
    window_dtype: torch.dtype = torch.bfloat16,
    row_dtype: torch.dtype = torch.bfloat16,
    drafts: int = 0,
) -> MemorySizes:
    """Sizes for a config; the windows leave room for so many drafted tokens (model.md section 5.4)."""
    return MemorySizes(
        state_shape=(config.kda_num_heads, config.kda_head_dim, config.kda_head_dim),
        window_shape=(config.kda_conv_size - 1 + drafts, 3 * config.kda_width),
        row_width=config.kv_lora_rank + config.qk_rope_head_dim,
        kda_layers=config.layer_kinds.count("kda"),
        mla_layers=config.layer_kinds.count("mla"),
        state_dtype=state_dtype,
        window_dtype=window_dtype,
        row_dtype=row_dtype,
    )


def pages(tokens: int, page: int) -> int:
    """Pages of `page` tokens that hold so many tokens."""
    return -(-tokens // page)


def parse_tokens(text: str) -> int:
    """ "4096", "128k" or "1M" as a number of tokens; k is 1,024 and M 1,048,576. Raises ValueError for other words."""
    found = re.fullmatch(r"([1-9]\d{0,11})([kKmM]?)", text.strip())
    if not found:
        raise ValueError(f"{text!r} is no number of tokens such as 4096, 128k or 1M")
    return int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]
