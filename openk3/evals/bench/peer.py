"""The peer of the training benchmark: a plain pre-norm Transformer with the same vocabulary and active parameters.

    x <- x + W_o attention(RMSNorm(x))        x <- x + W_down (silu(W_gate n) * W_up n),  n = RMSNorm(x)

Rotary positions, fused causal attention, one matrix for q, k and v and one for gate and up: what it is fastest with.
Letters: N sequences of equal length L, T = N L tokens, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.linear import Linear
from openk3.ops.attention import attend_blocked

THETA = 10000.0


class Rotary(nn.Module):
    """Rotation of [N, H, L, width] by position, pairs (j, j + width / 2); the angles are computed once."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, context: int):
        super().__init__()
        rate = THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.arange(context, dtype=torch.float64)[:, None] * rate
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [N, H, L, width] by PyTorch's kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by the blocks that K3's MLA layers use on a CPU, where that is the faster of the two."""
    n, _, length, width = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    o = attend_blocked(q, k, v, [(length, length)] * n, width**-0.5)
    return o.unflatten(0, (n, length)).transpose(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """x [N, L, D] to x [N, L, D]."""

    def __init__(self, width: int, heads: int, inner: int, context: int, std: float, attend: Attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv_proj, self.o_proj = Linear(width, 3 * width, std), Linear(width, width, std)
        self.gate_up_proj, self.down_proj = Linear(width, 2 * inner, std), Linear(inner, width, std)
        self.rotary = Rotary(width // heads, context)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        o = self.attend(self.rotary(q), self.rotary(k), v)
        x = x + self.o_proj(o.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class PlainTransformer(nn.Module):
    """Token ids [N, L] to normed hidden states [T, D]; `lm_head` is applied by the loss."""

    def __init__(self, config: K3Config, inner: int, context: int, attend: Attend = fused, heads: int = 0):
        super().__init__()
        d, std = config.hidden_size, config.initializer_range
        self.width, self.heads = d, heads or config.num_attention_heads
        self.embed_tokens = Linear(d, config.vocab_size, std)
        self.layers = nn.ModuleList(
            Block(d, self.heads, inner, context, std, attend) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.lm_head = Linear(d, config.vocab_size, std)

    def forward(self, tokens_NL: Tensor) -> Tensor:
        x = F.embedding(tokens_NL, self.embed_tokens.weight)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).flatten(0, 1)


def peer_parameters(config: K3Config, inner: int) -> int:
    """Active parameters of a peer: the head counts, the input embedding does not."""
    d = config.hidden_size
    layer = 4 * d * d + 3 * d * inner + 2 * d
    return config.num_hidden_layers * layer + d + config.vocab_size * d


def matching_inner(config: K3Config, active: int) -> int:
    """Inner width with which a peer has `active` parameters, as nearly as a whole number allows.

    Raises ValueError if attention and head alone are more than that by half a step.
    """
    none = peer_parameters(config, 0)
    inner = round((active - none) / (3 * config.num_hidden_layers * config.hidden_size))
    if inner < 1:
        raise ValueError(f"a plain Transformer without FFN already has {none:,} active parameters, not {active:,}")
    return inner


def plain_transformer(
    config: K3Config, active: int, context: int, seed: int, attend: Attend = fused, heads: int = 0
) -> PlainTransformer:
    """A fresh peer with `active` parameters, as many layers as `config` and, without `heads`, as many heads as its
    MLA layers; a pure function of its arguments."""
    model = PlainTransformer(config, matching_inner(config, active), context, attend, heads)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Linear):
            module.reset(generator)
    return model
