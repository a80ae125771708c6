"""transformers' `kimi_linear` as an outside oracle for what both share: KDA with the older gate, NoPE MLA, the MoE."""

import inspect

import pytest
import torch

from openk3.config import named
from openk3.model.k3 import K3
from openk3.model.memory import Sequences

pytest.importorskip("transformers.models.kimi_linear", reason="this transformers has no kimi_linear")
from transformers.models.kimi_linear import modeling_kimi_linear as oracle  # after the check
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

CONFIG = named("pico").replace(
    decay="softplus", kda_gate="low_rank", mla_gate=False, activation="swiglu", latent_moe=False, residual="plain"
)
T = 70


def theirs() -> KimiLinearConfig:
    c = CONFIG
    return KimiLinearConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_attention_heads,
        q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        linear_num_heads=c.kda_num_heads,
        linear_head_dim=c.kda_head_dim,
        moe_intermediate_size=c.moe_intermediate_size,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.num_experts_per_token,
        n_shared_experts=c.num_shared_experts,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        rms_norm_eps=c.rms_norm_eps,
        attn_implementation="eager",
    )


def ours(kind: str, layer: int | None = None) -> torch.nn.Module:
    """A layer of ours with weights large enough that every path shows in the output."""
    model = K3.initialised(CONFIG, 0).eval()
    found = model.model.layers[CONFIG.layer_kinds.index(kind) if layer is None else layer]
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "norm" in name or name.endswith("A_log"):
                p += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            elif "conv1d" not in name and "dt_bias" not in name:
                p *= 8
    return found


def inputs() -> tuple[torch.Tensor, Sequences]:
    x = torch.randn(T, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2))
    return x, Sequences.of(T, torch.tensor([0, T], dtype=torch.int32))


def copy_into(module: torch.nn.Module, mine: dict[str, torch.Tensor]) -> None:
    """Copy our tensors into theirs by name; every one of theirs must be met."""
    target = module.state_dict()
    assert set(target) == set(mine), set(target) ^ set(mine)
    for name, value in target.items():
        value.copy_(mine[name].reshape(value.shape))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 2e-5 * b.abs().max().clamp(min=1) and b.std() > 1e-3)


@torch.no_grad()
def test_mla_without_positions() -> None:
    mine, (x, sequences) = ours("mla").self_attn, inputs()
    layer = oracle.KimiLinearAttention(theirs(), 0)
    copy_into(layer, mine.state_dict())
    mask = torch.full((T, T), float("-inf")).triu(1)[None, None]
    assert close(mine(x, sequences), layer(x[None], mask)[0][0])


@torch.no_grad()
def test_kda_with_the_older_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inspect.unwrap(oracle.chunk_kimi_delta_attention)  # the torch form, not the GPU kernel it may stand for
    monkeypatch.setattr(oracle, "chunk_kimi_delta_attention", plain)
    mine, (x, sequences) = ours("kda").self_attn, inputs()
    layer = oracle.KimiLinearDeltaAttention(theirs(), 0)
    tensors = mine.state_dict()
    rename = {"g_proj.down.weight": "g_a_proj.weight", "g_proj.up.weight": "g_b_proj.weight"}
    rename |= {name: "forget_gate." + name for name in ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")}
    conv = torch.cat([tensors.pop(f"{x}_conv1d.weight") for x in "qkv"])
    copy_into(layer, {rename.get(k, k): v for k, v in tensors.items()} | {"conv1d.weight": conv})
    assert close(mine(x, sequences), layer(x[None])[0])


@torch.no_grad()
def test_moe_without_a_latent() -> None:
    mine, (x, _) = ours("kda", layer=1).block_sparse_moe, inputs()
    layer = oracle.KimiLinearMoE(theirs())
    tensors = mine.state_dict()
    tensors["gate.e_score_correction_bias"] += torch.linspace(-0.2, 0.2, CONFIG.num_experts)
    w1, w2, w3 = (tensors.pop(f"experts.w{i}") for i in (1, 2, 3))
    copy_into(layer, tensors | {"experts.gate_up_proj": torch.cat([w1, w3], dim=1), "experts.down_proj": w2})
    assert close(mine(x), layer(x[None])[0])
