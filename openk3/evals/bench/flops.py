"""Floating-point operations of a training step by arithmetic, from the shapes alone.

A product [m, k] x [k, n] counts 2 m k n. Only matrix products count: norms, gates, convolutions, softmax and the
mixing of depths are not arithmetic that a CPU's peak rate could bound. The backward pass counts twice the forward;
what an implementation computes again, or above the diagonal of a causal product, counts as waste and not as work.

Letters: T tokens in sequences of L, D hidden, H heads, K and V key and value widths, C tokens of a KDA chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from openk3.evals.bench.peer import PlainTransformer
from openk3.model.k3 import K3
from openk3.model.linear import Linear
from openk3.model.moe import MoE, Router
from openk3.ops.kda.chunked import preferred_chunk
from openk3.train.muon import Bucket

NEWTON_SCHULZ_STEPS = 5  # what muon.newton_schulz takes when nothing is said


@dataclass(frozen=True)
class StepFlops:
    """Operations of one step, by what they are for."""

    projections: int  # every weight matrix a token meets, the output head included
    attention: int  # softmax attention between tokens
    recurrence: int  # KDA between tokens
    optimizer: int  # Newton-Schulz; AdamW has no products

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.recurrence + self.optimizer


def projections(model: nn.Module) -> int:
    """Forward, a token: 2 x every matrix element it meets; k of E experts; the embedding is a look-up."""
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, Linear | Router) and not name.endswith("embed_tokens"):
            total += module.weight.numel()
        elif isinstance(module, MoE):
            stack = module.experts
            total += sum(w.numel() for w in stack.parameters()) * module.gate.k // len(stack.w1)
    return 2 * total


def causal_attention(tokens: int, context: int, heads: int, qk: int, v: int) -> int:
    """Forward: query i of a sequence meets i keys."""
    pairs = tokens * (context + 1) // 2
    return 2 * pairs * heads * (qk + v)


def delta_rule(tokens: int, heads: int, k: int, v: int, chunk: int) -> int:
    """Forward in chunks: a token and head takes 6 K V on the state (two reads, one write), 2 C K for the scores of
    its key and of its query with the C tokens of the chunk each, 2 C V for the UT transform and for the output each,
    and C^2 / 3 for its share of the inverse of a triangle."""
    return tokens * heads * (6 * k * v + 4 * chunk * (k + v)) + tokens * heads * chunk**2 // 3


def newton_schulz(shapes: Iterable[tuple[int, int, int]]) -> int:
    """Five quintic steps on blocks (number, rows, columns): y y^T, its square, and the product with y."""
    total = 0
    for blocks, rows, columns in shapes:
        short, long = sorted((rows, columns))
        total += NEWTON_SCHULZ_STEPS * blocks * (4 * short**2 * long + 2 * short**3)
    return total


def muon_flops(buckets: Iterable[Bucket]) -> int:
    return newton_schulz((part.blocks, part.rows, part.columns) for bucket in buckets for part in bucket.parts)


def k3_step(model: K3, tokens: int, context: int, optimizer: int = 0) -> StepFlops:
    """A step of K3 on `tokens` tokens in whole sequences of `context`; `optimizer` is what its update takes."""
    c = model.config
    mla, kda = c.layer_kinds.count("mla"), c.layer_kinds.count("kda")
    attention = causal_attention(tokens, context, c.num_attention_heads, c.qk_head_dim, c.v_head_dim)
    chunk = preferred_chunk(c.kda_head_dim, c.kda_head_dim)
    recurrence = delta_rule(tokens, c.kda_num_heads, c.kda_head_dim, c.kda_head_dim, chunk)
    return StepFlops(3 * tokens * projections(model), 3 * mla * attention, 3 * kda * recurrence, optimizer)


def plain_step(model: PlainTransformer, tokens: int, context: int, optimizer: int = 0) -> StepFlops:
    """The same of the peer."""
    width = model.width // model.heads
    attention = causal_attention(tokens, context, model.heads, width, width)
    return StepFlops(3 * tokens * projections(model), 3 * len(model.layers) * attention, 0, optimizer)
