"""The KDA layer (report section 2.1.1, eq. 1 to 6; model.md section 5).

    q, k, v = SiLU(conv(W x))    beta = sigma(W_b x)    log decay = g_min sigma(e^A (W_up W_down x + b))
    o = delta rule with channel-wise decay over (q, k, v)      y = W_o [ sigma(W_g x) * RMSNorm(o) ]

Everything that crosses tokens happens in `mix`: the short convolution and the recurrence. Both reach their ops
through attributes, so that a parallel layout can put its own in their place.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.linear import ConvWeight, Linear, Weight
from openk3.model.memory import KDAView, Memory, Sequences
from openk3.ops.kda import BoundedGate, kda, kda_step
from openk3.ops.norm import gated_head_norm
from openk3.ops.shortconv import short_conv

OpInputs = tuple[Tensor, Tensor, BoundedGate | None]  # g, beta, gate as the op takes them


class BoundedDecay:
    """K3's map: log decay = g_min sigma(e^A (z + b)), in (g_min, 0) (eq. 5). Fused: the op takes the logits."""

    def __init__(self, config: K3Config):
        self.lower_bound = config.kda_gate_lower_bound

    def op_inputs(self, z_THK: Tensor, beta_TH: Tensor, a_log_H: Tensor, dt_bias_HK: Tensor) -> OpInputs:
        return z_THK, beta_TH, BoundedGate(a_log_H, dt_bias_HK, self.lower_bound)

    def log_decay(self, z_THK: Tensor, a_log_H: Tensor, dt_bias_HK: Tensor) -> Tensor:
        return self.lower_bound * torch.sigmoid(a_log_H.exp()[:, None] * (z_THK + dt_bias_HK))


class SoftplusDecay:
    """Kimi Linear's map: log decay = -e^A softplus(z + b), unbounded below."""

    def __init__(self, config: K3Config):
        pass

    def op_inputs(self, z_THK: Tensor, beta_TH: Tensor, a_log_H: Tensor, dt_bias_HK: Tensor) -> OpInputs:
        dtype = torch.promote_types(z_THK.dtype, torch.float32)
        g_THK = self.log_decay(z_THK.to(dtype), a_log_H, dt_bias_HK)
        return g_THK, torch.sigmoid(beta_TH.to(dtype)), None

    def log_decay(self, z_THK: Tensor, a_log_H: Tensor, dt_bias_HK: Tensor) -> Tensor:
        return -a_log_H.exp()[:, None] * F.softplus(z_THK + dt_bias_HK)


class LowRankGate(nn.Module):
    """Kimi Linear's output gate: rank of one head's width instead of full rank."""

    def __init__(self, n_in: int, n_out: int, rank: int, std: float):
        super().__init__()
        self.down = Linear(n_in, rank, std)
        self.up = Linear(rank, n_out, std)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.up(self.down(x_TD))


DECAYS = {"bounded": BoundedDecay, "softplus": SoftplusDecay}


class KDA(nn.Module):
    """One KDA layer: x [T, D] to y [T, D]; recurrent state [H, K, V] and conv tail [3, 3 H K] a sequence."""

    def __init__(self, config: K3Config, layer: int):
        super().__init__()
        d, p, std = config.hidden_size, config.kda_width, config.initializer_range
        self.layer, self.heads, self.width = layer, config.kda_num_heads, config.kda_head_dim
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, p, std) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ConvWeight(p, config.kda_conv_size) for _ in range(3))
        self.f_a_proj = Linear(d, self.width, std)
        self.f_b_proj = Linear(self.width, p, std)
        self.b_proj = Linear(d, self.heads, std)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(p))
        self.o_norm = Weight(self.width, fill=1.0)
        full_rank = config.kda_gate == "full_rank"
        self.g_proj = Linear(d, p, std) if full_rank else LowRankGate(d, p, self.width, std)
        self.o_proj = Linear(p, d, std)
        self.eps = config.rms_norm_eps
        self.decay = DECAYS[config.decay](config)
        self.op, self.step_op, self.conv_op = kda, kda_step, short_conv

    def reset(self, generator: torch.Generator) -> None:
        """A_log 0; dt log-uniform in [0.001, 0.1], its inverse softplus as bias (model.md section 14)."""
        self.A_log.data.zero_()
        low, high = math.log(0.001), math.log(0.1)
        dt = torch.empty(self.dt_bias.shape).uniform_(low, high, generator=generator).exp()
        self.dt_bias.data.copy_(torch.log(torch.expm1(dt)))

    def log_decay(self, x_TD: Tensor) -> Tensor:
        """Log decay [T, H, K] of every token, for reports."""
        z_THK = self.f_b_proj(self.f_a_proj(x_TD)).unflatten(-1, (self.heads, self.width))
        return self.decay.log_decay(z_THK, self.A_log, self.dt_bias.view(self.heads, self.width))

    def forward(self, x_TD: Tensor, sequences: Sequences, memory: Memory | None = None) -> Tensor:
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        qkv_TP = F.linear(x_TD, weight.to(x_TD.dtype))
        z_TP = self.f_b_proj(self.f_a_proj(x_TD))
        beta_TH = self.b_proj(x_TD)
        if memory is None:
            o_THV, _, _ = self.mix(qkv_TP, z_TP, beta_TH, sequences.cu_seqlens, None, None)
        else:
            o_THV = self.mix_in_memory(qkv_TP, z_TP, beta_TH, sequences, memory.kda(self.layer))
        gate_THV = self.g_proj(x_TD).view_as(o_THV)
        return self.o_proj(gated_head_norm(o_THV, self.o_norm.weight, gate_THV, self.eps).flatten(1))

    def heads_of(self, qkv_TP: Tensor, z_TP: Tensor) -> tuple[Tensor, ...]:
        """Convolved q, k, v and decay logits, each [T, H, width]."""
        q, k, v = qkv_TP.chunk(3, dim=-1)
        return tuple(t.unflatten(-1, (self.heads, self.width)) for t in (q, k, v, z_TP))

    def conv_weight(self) -> Tensor:
        return torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)

    def gate_inputs(self, z_THK: Tensor, beta_TH: Tensor) -> OpInputs:
        return self.decay.op_inputs(z_THK, beta_TH, self.A_log, self.dt_bias.view(self.heads, self.width))

    def mix(
        self,
        qkv_TP: Tensor,
        z_TP: Tensor,
        beta_TH: Tensor,
        cu_seqlens: Tensor,
        tail: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution and recurrence over whole sequences: (o [T, H, V], conv tail, final state)."""
        qkv_TP, tail = self.conv_op(qkv_TP, self.conv_weight(), cu_seqlens=cu_seqlens, initial_tail=tail)
        q, k, v, z = self.heads_of(qkv_TP, z_TP)
        g, beta, gate = self.gate_inputs(z, beta_TH)
        o_THV, state = self.op(q, k, v, g, beta, cu_seqlens=cu_seqlens, gate=gate, initial_state=state)
        return o_THV, tail, state

    def mix_in_memory(
        self, qkv_TP: Tensor, z_TP: Tensor, beta_TH: Tensor, sequences: Sequences, view: KDAView
    ) -> Tensor:
        """The same from and into the slots of a memory; while tokens are speculative the inputs are kept."""

        def advance(qkv_TP: Tensor, z_TP: Tensor, beta_TH: Tensor, sequences: Sequences) -> Tensor:
            tail = view.tails[view.slots]
            if sequences.one_token_each:
                qkv_TP, tail = self.conv_op(
                    qkv_TP, self.conv_weight(), cu_seqlens=sequences.cu_seqlens, initial_tail=tail
                )
                q, k, v, z = self.heads_of(qkv_TP, z_TP)
                g, beta, gate = self.gate_inputs(z, beta_TH)
                o_THV = self.step_op(q, k, v, g, beta, state_SHKV=view.states, slots_N=view.slots, gate=gate)
            else:
                state = view.states[view.slots]
                o_THV, tail, state = self.mix(qkv_TP, z_TP, beta_TH, sequences.cu_seqlens, tail, state)
                view.states[view.slots] = state
            view.tails[view.slots] = tail.to(view.tails.dtype)
            return o_THV

        view.keep(advance, (qkv_TP, z_TP, beta_TH), sequences)
        return advance(qkv_TP, z_TP, beta_TH, sequences)
