"""The whole model on one page: embed -> layers -> output mix -> head (model.md section 4).

Legend: T tokens, N sequences, D hidden, V vocabulary. One flat token axis; `cu_seqlens` int32 [N + 1] delimits the
sequences, which never see each other. Parameter names are those of the released files, less "language_model.".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.model.attnres import Blocks, add, attention_site, ffn_site, output_site
from openk3.model.kda import KDA
from openk3.model.linear import Linear, RMSNorm, Weight
from openk3.model.memory import Memory, Sequences
from openk3.model.mla import MLA
from openk3.model.mlp import MLP
from openk3.model.moe import MOE

ATTENTION = {"kda": KDA, "mla": MLA}


class Layer(nn.Module):
    """(blocks, partial) -> (blocks, partial): attention then FFN, each reading the depth through its own site."""

    def __init__(self, config: K3Config, i: int):
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.self_attn = ATTENTION[config.layer_kinds[i]](config, i)
        if i in config.moe_layers:
            self.block_sparse_moe = MOE[config.latent_moe](config)
        else:
            self.mlp = MLP(config, config.intermediate_size)
        self.ffn_name = "block_sparse_moe" if i in config.moe_layers else "mlp"
        attention, ffn = attention_site(config, i), ffn_site(config)
        if config.residual != "plain":
            self.self_attention_res_proj = Weight(1, d, fill=0.0)
            self.self_attention_res_norm = Weight(d, fill=1.0)
            self.mlp_res_proj = Weight(1, d, fill=0.0)
            self.mlp_res_norm = Weight(d, fill=1.0)
            self.attention_site = attention(self.self_attention_res_proj, self.self_attention_res_norm, eps)
            self.ffn_site = ffn(self.mlp_res_proj, self.mlp_res_norm, eps)
        else:
            self.attention_site, self.ffn_site = attention(), ffn()

    def forward(
        self, blocks: Blocks, partial: Tensor, sequences: Sequences, memory: Memory | None = None
    ) -> tuple[Blocks, Tensor]:
        x_TD, blocks, held = self.attention_site(blocks, partial)
        held = add(held, self.self_attn(self.input_layernorm(x_TD), sequences, memory))
        x_TD, blocks, held = self.ffn_site(blocks, held)
        ffn = getattr(self, self.ffn_name)
        return blocks, add(held, ffn(self.post_attention_layernorm(x_TD)))


class Backbone(nn.Module):
    """Embedding, layers, the last read of the depth, the final norm."""

    def __init__(self, config: K3Config):
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Linear(d, config.vocab_size, config.initializer_range)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(d, eps)
        site = output_site(config)
        if config.residual != "plain":
            self.output_attn_res_proj = Weight(1, d, fill=0.0)
            self.output_attn_res_norm = Weight(d, fill=1.0)
            self.output_site = site(self.output_attn_res_proj, self.output_attn_res_norm, eps)
        else:
            self.output_site = site()


class K3(nn.Module):
    """The text model. `compute_dtype` is the dtype of activations; parameters may be wider masters."""

    def __init__(self, config: K3Config, *, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.model = Backbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.initializer_range)

    @classmethod
    def initialised(cls, config: K3Config, seed: int, *, compute_dtype: torch.dtype = torch.float32) -> K3:
        """A model with fresh weights (model.md section 14), a pure function of (config, seed)."""
        model = cls(config, compute_dtype=compute_dtype)
        model.reset(torch.Generator().manual_seed(seed))
        return model

    def reset(self, generator: torch.Generator) -> None:
        for module in self.modules():
            reset = getattr(module, "reset", None)  # every module with weights of its own has one
            if module is not self and callable(reset):
                reset(generator)

    def hidden(self, tokens_T: Tensor, cu_seqlens: Tensor, memory: Memory | None = None) -> Tensor:
        """Normed final hidden states [T, D] of int64 tokens [T].

        With a memory, the tokens continue the sequences in its chosen slots, and it moves on by as many.
        """
        starts_N = None
        if memory is not None:
            memory.check_room(cu_seqlens)
            starts_N = memory.starts_N
        sequences = Sequences.of(len(tokens_T), cu_seqlens, starts_N)
        partial = F.embedding(tokens_T, self.model.embed_tokens.weight).to(self.compute_dtype)
        blocks: Blocks = ()
        for layer in self.model.layers:
            blocks, partial = layer(blocks, partial, sequences, memory)
        if memory is not None:
            memory.advance(cu_seqlens)
        x_TD, _, _ = self.model.output_site(blocks, partial)
        return self.model.norm(x_TD)

    def forward(self, tokens_T: Tensor, cu_seqlens: Tensor, memory: Memory | None = None) -> Tensor:
        """Next-token logits [T, V] in the compute dtype."""
        return self.lm_head(self.hidden(tokens_T, cu_seqlens, memory))
