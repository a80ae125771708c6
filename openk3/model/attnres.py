"""Attention Residuals: how a sub-layer reads the depth before it (report section 2.2; model.md section 7).

There is no residual stream. What flows is `blocks`, a tuple of finished block vectors [T, D], and `partial`, the
running sum of the block under way (None right after a block was closed). A *site* stands before every attention and
every FFN: it reads `blocks` and `partial` into the sub-layer's input and, at a block's first layer, closes the
block. Which site class stands where is decided once, when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from openk3.config import K3Config
from openk3.model.linear import Weight
from openk3.ops.attnres import attnres, attnres_weights

Blocks = tuple[Tensor, ...]
Observer = Callable[[Tensor], None]


class PlainSite:
    """The ordinary residual stream: the input is the partial sum, which never ends."""

    mixes = False

    def __init__(self, query: Weight | None = None, norm: Weight | None = None, eps: float = 1e-5):
        self.query, self.norm, self.eps = query, norm, eps
        self.observer: Observer | None = None  # called with the weights [sources, T] of every read
        self.op = attnres

    def __call__(self, blocks: Blocks, partial: Tensor) -> tuple[Tensor, Blocks, Tensor | None]:
        return partial, blocks, partial


class FirstSite(PlainSite):
    """Layer 0's attention: the embedding is its input and becomes the first block. Its query is never used."""

    def __call__(self, blocks: Blocks, partial: Tensor) -> tuple[Tensor, Blocks, Tensor | None]:
        return partial, (*blocks, partial), None


class MixSite(PlainSite):
    """Softmax over the finished blocks and the partial sum, with a learned query that sees no input."""

    mixes = True

    def read(self, blocks: Blocks, partial: Tensor) -> Tensor:
        assert self.query is not None and self.norm is not None
        sources = [*blocks, partial]
        query, gamma = self.query.weight.flatten(), self.norm.weight
        if self.observer is not None:
            with torch.no_grad():
                self.observer(attnres_weights(sources, query, gamma, self.eps))
        return self.op(sources, query, gamma, self.eps)

    def __call__(self, blocks: Blocks, partial: Tensor) -> tuple[Tensor, Blocks, Tensor | None]:
        return self.read(blocks, partial), blocks, partial


class BoundarySite(MixSite):
    """The same read, after which the partial sum is finished: it joins the blocks and a new sum begins."""

    def __call__(self, blocks: Blocks, partial: Tensor) -> tuple[Tensor, Blocks, Tensor | None]:
        return self.read(blocks, partial), (*blocks, partial), None


def attention_site(config: K3Config, layer: int) -> type[PlainSite]:
    """Class of the site before the attention of `layer`."""
    if config.residual == "plain":
        return PlainSite
    if layer == 0:
        return FirstSite
    opens = config.residual == "full" or layer % config.attn_res_block_size == 0
    return BoundarySite if opens else MixSite


def ffn_site(config: K3Config) -> type[PlainSite]:
    """Class of the site before an FFN: in the full form (report eq. 8, 9) every sub-layer is a block of its own."""
    return {"plain": PlainSite, "block": MixSite, "full": BoundarySite}[config.residual]


def output_site(config: K3Config) -> type[PlainSite]:
    """Class of the last read, before the final norm."""
    return PlainSite if config.residual == "plain" else MixSite


def add(partial: Tensor | None, y: Tensor) -> Tensor:
    """The partial sum after one more sub-layer, rounded to the compute dtype by the add itself."""
    return y if partial is None else partial + y
