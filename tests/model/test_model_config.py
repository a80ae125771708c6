"""K3Config: named sizes, layer kinds, config.json, the refusals; the parameter audit against the golden numbers."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from openk3.config import MECHANISMS, SIZES, K3Config, named
from openk3.model.audit import audit
from openk3.model.k3 import K3
from openk3.model.released import meta_model, text_entries, vision_entries
from openk3.model.variants import K2LIKE, k2like, rematch

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "parameter_audit.json").read_text())


@pytest.mark.parametrize("size", SIZES)
def test_config_json_round_trip(size: str) -> None:
    config = named(size)
    assert K3Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert "openk3" not in config.to_hf()


def test_ablations_live_under_their_own_key() -> None:
    config = named("pico").replace(**K2LIKE)
    hf = config.to_hf()
    assert hf["openk3"] == {k: v for k, v in K2LIKE.items() if k in MECHANISMS}
    assert K3Config.from_hf(hf) == config


@pytest.mark.row(29, 31)
def test_layer_kinds_of_k3() -> None:
    text = named("k3").to_hf()["text_config"]
    full = text["linear_attn_config"]["full_attn_layers"]
    assert full == [*range(4, 93, 4), 93] and len(full) == 24
    assert len(text["linear_attn_config"]["kda_layers"]) == 69
    k3 = meta_model(named("k3"))
    dense = [i for i, layer in enumerate(k3.model.layers) if hasattr(layer, "mlp")]
    sparse = [i for i, layer in enumerate(k3.model.layers) if hasattr(layer, "block_sparse_moe")]
    assert dense == [0] and sparse == list(range(1, 93))
    assert k3.model.layers[0].mlp.gate_proj.weight.shape == (33792, 7168)


@pytest.mark.row(40)
def test_blocks_of_k3() -> None:
    names = [type(layer.attention_site).__name__ for layer in meta_model(named("k3")).model.layers]
    opens = [i for i, name in enumerate(names) if name in ("FirstSite", "BoundarySite")]
    assert opens == [0, 12, 24, 36, 48, 60, 72, 84]  # 7 blocks of 12 and one of 9
    assert named("k3").attn_res_block_size * 7 + 9 == 93


@pytest.mark.row(51, 52)
def test_audit_of_k3_is_the_released_one() -> None:
    k3 = named("k3")
    found = audit(k3, vision=True, packed=True)
    totals, active, files = GOLDEN["totals"], GOLDEN["active_text_per_token"], GOLDEN["checkpoint"]
    assert found.total == totals["all"] and found.nbytes == files["bytes"] and found.tensors == files["tensors"]
    assert found.active == active["without_input_embedding"]
    parts = found.parts
    assert parts["KDA layers"] == totals["kda_layers"] and parts["MLA layers"] == totals["mla_layers"]
    assert parts["routed experts"] == totals["routed_experts"]
    assert parts["shared experts"] == active["shared_experts"]
    assert parts["latent projections"] == active["latent_projections"] + 92 * 3584  # golden leaves the norm out
    assert parts["routers"] == active["router_gates"] + 92 * 896  # and the bias
    assert parts["vision tower"] == totals["vision_tower"] and parts["projector"] == totals["projector"]
    assert parts["norms and AttnRes queries"] == totals["norms_and_attnres_queries"]
    assert parts["routed experts"] // 92 // 896 == 3 * 3584 * 3072
    assert k3.num_experts_per_token / k3.num_experts == 16 / 896


def test_dtypes_and_tensor_groups_of_k3() -> None:
    entries = [*text_entries(named("k3"), packed=True), *vision_entries(7168)]
    kinds = GOLDEN["checkpoint"]["tensors_by_kind"]
    assert Counter(e.dtype for e in entries) == {
        "BF16": kinds["bf16"],
        "F32": kinds["f32"],
        "U8": kinds["packed_weights_u8"] + kinds["scales_u8"],
    }
    shapes = {e.name: e.shape for e in entries}
    assert shapes["language_model.model.layers.0.self_attn.A_log"] == (128,)
    assert shapes["language_model.model.layers.3.self_attn.kv_b_proj.weight"] == (24576, 512)
    assert shapes["language_model.model.layers.1.block_sparse_moe.experts.895.w2.weight_scale"] == (3584, 96)


@pytest.mark.parametrize(
    ("size", "total", "active"),
    [("pico", 0.45e6, 0.3e6), ("nano", 2.65e6, 1.27e6), ("mini", 107e6, 47e6), ("small", 2.75e9, 1.0e9)],
)
def test_sizes_are_about_what_they_are_called(size: str, total: float, active: float) -> None:
    found = audit(named(size))
    assert found.total == pytest.approx(total, rel=0.1) and found.active == pytest.approx(active, rel=0.1)
    assert size != "pico" or found.total < 500_000


@pytest.mark.parametrize("size", ["pico", "nano", "mini", "small"])
def test_k2like_has_the_same_active_parameters(size: str) -> None:
    config = named(size)
    old = k2like(config)
    assert audit(old).active == pytest.approx(audit(config).active, rel=0.01)
    changed = {f.name for f in dataclasses.fields(old) if getattr(old, f.name) != getattr(config, f.name)}
    assert changed == {*K2LIKE, "moe_intermediate_size"}
    with pytest.raises(ValueError, match="no expert inner width"):
        rematch(old, 1000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention": "linear"}, "attention = 'linear' is not one of 'hybrid', 'mla', 'kda'"),
        ({"latent_moe": 1}, "latent_moe = 1 is not one of"),
        ({"hidden_size": 0}, "hidden_size = 0 is too small"),
        ({"hidden_size": 6.5}, "hidden_size = 6.5 is not a whole number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x' is not a number"),
        ({"hidden_size": 2**31}, "hidden_size = 2147483648 is too large"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05 must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan is not a number"),
        ({"activation_situ_beta": 0.0}, "activation_situ_beta = 0.0 must be above 0"),
        ({"initializer_range": -0.1}, "initializer_range = -0.1 must not be negative"),
        ({"num_shared_experts": 0}, "num_shared_experts = 0 is too small"),
        ({"num_experts_per_token": 8}, "num_experts_per_token = 8 must be below num_experts = 8"),
        ({"vocab_size": 300}, "vocab_size = 300 leaves no room"),
        ({"first_k_dense_replace": 6}, "first_k_dense_replace = 6 exceeds num_hidden_layers = 5"),
        ({"kda_gate_lower_bound": -7.0}, r"kda_gate_lower_bound = -7.0 is not in \[-5, 0\)"),
        ({"mla_position": "rope", "qk_rope_head_dim": 15}, "qk_rope_head_dim = 15 must be even"),
        ({"moe_intermediate_size": 33}, "moe_intermediate_size = 33 is not a multiple of 32"),
    ],
)
def test_impossible_configs_name_the_field(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named("pico").replace(**change)


def test_foreign_config_json() -> None:
    hf = named("pico").to_hf()
    with pytest.raises(ValueError, match="no field 'text_config'"):
        K3Config.from_hf({})
    hf["text_config"]["linear_attn_config"]["full_attn_layers"] = [1, 2]
    with pytest.raises(ValueError, match="full_attn_layers"):
        K3Config.from_hf(hf)
    with pytest.raises(ValueError, match="no size 'huge'"):
        named("huge")


def test_init_is_a_pure_function_of_the_seed() -> None:
    one, two, other = (K3.initialised(named("pico"), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


@pytest.mark.row(15, 16, 36)
def test_start_values() -> None:
    model = K3.initialised(named("nano"), 0).requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("A_log") or "_res_proj" in name:
            assert (p == 0).all()
        elif name.endswith("dt_bias"):
            keep = torch.exp(-5 * torch.sigmoid(p))  # A = 0, z = 0
            assert keep.min() > 0.62 and keep.max() < 0.9951 and keep.std() > 0.05
        elif "norm" in name:
            assert (p == 1).all()
        elif "conv1d" in name:
            assert p.abs().max() <= 0.5 and p.std() > 0.2
        else:
            assert p.std() == pytest.approx(0.02, rel=0.15)
    assert all((b == 0).all() for b in model.buffers())


def test_every_swap_builds_and_names_itself() -> None:
    for name, values in MECHANISMS.items():
        for value in values[1:]:
            config = named("pico").replace(**{name: value})
            assert config.ablations == {name: value}
            assert len(list(meta_model(config).parameters())) > 50
