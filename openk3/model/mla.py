"""Gated multi-head latent attention without positions (report section 2.1.2, eq. 7; model.md section 6).

Per token only a normed latent and one key part shared by all heads are remembered. The 64 "rope" channels exist but
are never rotated: order comes from the KDA layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.linear import Linear, RMSNorm
from openk3.model.memory import Memory, Sequences
from openk3.ops.mla import mla_expanded, mla_over_view


class NoPE:
    """No positions: the last channels of q and the shared key part pass as they are."""

    def __init__(self, config: K3Config):
        pass

    def query(self, q_THQ: Tensor, positions_T: Tensor) -> Tensor:
        return q_THQ

    def key(self, k_pe_TR: Tensor, positions_T: Tensor) -> Tensor:
        return k_pe_TR


class RoPE(NoPE):
    """Rotary positions on the last R channels, pairs (j, j + R/2), base `rope_theta`: what K2 does."""

    def __init__(self, config: K3Config):
        self.theta, self.width, self.nope = config.rope_theta, config.qk_rope_head_dim, config.qk_nope_head_dim

    def rotate(self, x: Tensor, positions_T: Tensor) -> Tensor:
        """x [T, ..., R] rotated by its token's position; angles in promote(dtype, float32)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        exponent = torch.arange(0, self.width, 2, dtype=dtype, device=x.device) / self.width
        angle = positions_T.to(dtype)[:, None] * self.theta**-exponent
        angle = angle.view(angle.shape[0], *(1,) * (x.dim() - 2), -1)
        a, b = x.to(dtype).chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    def query(self, q_THQ: Tensor, positions_T: Tensor) -> Tensor:
        return torch.cat([q_THQ[..., : self.nope], self.rotate(q_THQ[..., self.nope :], positions_T)], dim=-1)

    def key(self, k_pe_TR: Tensor, positions_T: Tensor) -> Tensor:
        return self.rotate(k_pe_TR, positions_T)


def sigmoid_gate(o_TP: Tensor, logits_TP: Tensor) -> Tensor:
    """o * sigma(W_g x), per channel, no norm (eq. 7)."""
    dtype = torch.promote_types(o_TP.dtype, torch.float32)
    return (o_TP.to(dtype) * torch.sigmoid(logits_TP.to(dtype))).to(logits_TP.dtype)


def no_gate(o_TP: Tensor, x_TD: Tensor) -> Tensor:
    """MLA as in K2: the attention output goes straight to the output projection."""
    return o_TP


POSITIONS = {"nope": NoPE, "rope": RoPE}
QKObserver = Callable[[Tensor, Tensor, Tensor, float, Tensor], None]


class MLA(nn.Module):
    """One gated MLA layer: x [T, D] to y [T, D]."""

    def __init__(self, config: K3Config, layer: int):
        super().__init__()
        d, std, h = config.hidden_size, config.initializer_range, config.num_attention_heads
        self.layer, self.heads, self.qk_dim = layer, h, config.qk_head_dim
        self.nope, self.latent, self.v_dim = config.qk_nope_head_dim, config.kv_lora_rank, config.v_head_dim
        eps = config.mla_lowrank_norm_eps
        self.q_a_proj = Linear(d, config.q_lora_rank, std)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = Linear(config.q_lora_rank, h * self.qk_dim, std)
        self.kv_a_proj_with_mqa = Linear(d, self.latent + config.qk_rope_head_dim, std)
        self.kv_a_layernorm = RMSNorm(self.latent, eps)
        self.kv_b_proj = Linear(self.latent, h * (self.nope + self.v_dim), std)
        self.g_proj = Linear(d, h * self.v_dim, std) if config.mla_gate else nn.Identity()
        self.gate = sigmoid_gate if config.mla_gate else no_gate
        self.o_proj = Linear(h * self.v_dim, d, std)
        self.position = POSITIONS[config.mla_position](config)
        self.scale = self.qk_dim**-0.5
        self.observer: QKObserver | None = None  # sees q, k_nope, k_pe of each training batch, for QK-clip
        self.op, self.view_op = mla_expanded, mla_over_view

    def forward(self, x_TD: Tensor, sequences: Sequences, memory: Memory | None = None) -> Tensor:
        q_THQ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))).unflatten(-1, (self.heads, self.qk_dim))
        latent_TL, k_pe_TR = self.kv_a_proj_with_mqa(x_TD).split([self.latent, self.qk_dim - self.nope], dim=-1)
        latent_TL = self.kv_a_layernorm(latent_TL)
        q_THQ = self.position.query(q_THQ, sequences.positions_T)
        k_pe_TR = self.position.key(k_pe_TR, sequences.positions_T)
        w_kv_b = self.kv_b_proj.weight.to(x_TD.dtype)
        if self.observer is not None and self.training:
            self.show_qk(q_THQ, latent_TL, k_pe_TR, w_kv_b, sequences.cu_seqlens)
        if memory is None:
            o_THV = self.op(
                q_THQ, latent_TL, k_pe_TR, w_kv_b, nope=self.nope, cu_seqlens=sequences.cu_seqlens, scale=self.scale
            )
        else:
            view = memory.kv(self.layer)
            view.append(torch.cat([latent_TL, k_pe_TR], dim=-1), sequences.cu_seqlens)
            o_THV = self.view_op(q_THQ, view, w_kv_b, nope=self.nope, cu_seqlens=sequences.cu_seqlens, scale=self.scale)
        return self.o_proj(self.gate(o_THV.flatten(1), self.g_proj(x_TD)))

    @torch.no_grad()
    def show_qk(self, q_THQ: Tensor, latent_TL: Tensor, k_pe_TR: Tensor, w_kv_b: Tensor, cu_seqlens: Tensor) -> None:
        w_k = w_kv_b.unflatten(0, (self.heads, -1))[:, : self.nope].flatten(0, 1)
        k_nope_THD = F.linear(latent_TL, w_k).unflatten(-1, (self.heads, self.nope))
        assert self.observer is not None
        self.observer(q_THQ.detach(), k_nope_THD, k_pe_TR.detach(), self.scale, cu_seqlens)
