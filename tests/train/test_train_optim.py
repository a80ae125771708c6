"""Every parameter in exactly one group, the written AdamW rule, decay where it belongs, state that comes back."""

import pytest
import torch
from torch import nn

from openk3.config import named
from openk3.model.k3 import K3
from openk3.train.optim import AdamW, Optimizer
from openk3.train.parameters import plan, treatment
from openk3.train.recipe import OptimRecipe

CONFIG = named("pico")
ABLATIONS = [
    {},
    {"attention": "mla"},
    {"attention": "kda"},
    {"residual": "plain"},
    {"residual": "full"},
    {"latent_moe": False},
    {"latent_norm": False},
    {"kda_gate": "low_rank"},
    {"mla_gate": False},
]


def parameters(config):
    with torch.device("meta"):
        return list(K3(config).named_parameters())


@pytest.mark.parametrize("size", ["pico", "nano", "mini", "small", "k3"])
@pytest.mark.parametrize("changes", ABLATIONS, ids=str)
@pytest.mark.parametrize("optimizer", ["per_head_muon", "muon", "adamw"])
def test_every_parameter_is_in_exactly_one_group(size, changes, optimizer):
    if size == "k3" and changes:
        size = "nano"
    config = named(size).replace(**changes)
    named_parameters = parameters(config)
    found = plan(named_parameters, config, optimizer=optimizer)
    placed = [*{part.name for part in found.muon}, *found.adamw, *found.adamw_undecayed]
    assert sorted(placed) == sorted(name for name, _ in named_parameters)
    shapes = dict(named_parameters)
    covered = dict.fromkeys({part.name for part in found.muon}, 0)
    for part in found.muon:
        covered[part.name] += part.blocks * part.rows * part.columns
    assert all(shapes[name].numel() == count for name, count in covered.items())


@pytest.mark.row(95)
def test_k3_has_its_published_number_of_per_head_blocks():
    config = named("k3")
    found = plan(parameters(config), config)
    blocks = {part.name.split(".")[-2]: part for part in found.muon if part.name in found.heads}
    assert {name: (p.blocks, p.rows, p.columns) for name, p in blocks.items()} == {
        "q_proj": (96, 128, 7168),
        "k_proj": (96, 128, 7168),
        "v_proj": (96, 128, 7168),
        "q_b_proj": (96, 192, 1536),
        "kv_b_proj": (96, 256, 512),
    }
    assert sum(part.blocks for part in found.muon if part.name in found.heads) == 96 * (3 * 69 + 2 * 24)
    whole = {part.name.split(".")[-2] for part in found.muon if part.blocks == 1}
    assert {"o_proj", "g_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate", "routed_expert_down_proj"} <= whole


@pytest.mark.row(95)
def test_wrapped_or_missing_parameters_are_refused_not_treated_as_plain_muon():
    good = parameters(CONFIG)
    wrapped = [(f"_orig_mod.{name}", p) for name, p in good]
    with pytest.raises(ValueError, match=r"'_orig_mod.model.embed_tokens.weight' fits 0 of the optimizer's name rules"):
        plan(wrapped, CONFIG)
    lost = [(name, p) for name, p in good if name != "model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match="found 24 per-head blocks for Muon, the config has 26"):
        plan(lost, CONFIG)
    odd = [(n, torch.empty(65, 64) if n == "model.layers.0.self_attn.q_proj.weight" else p) for n, p in good]
    with pytest.raises(ValueError, match="has 65 rows, which its 2 heads do not divide"):
        plan(odd, CONFIG)


def test_what_is_decayed():
    kinds = {name: treatment(name) for name, _ in parameters(CONFIG)}
    undecayed = {name for name, kind in kinds.items() if kind == "adamw_undecayed"}
    assert undecayed == {
        name for name in kinds if name.endswith(("norm.weight", "res_proj.weight", "A_log", "dt_bias"))
    }
    model = K3.initialised(CONFIG, 0).double()
    for p in model.parameters():
        p.data.fill_(1.0)
        p.grad = torch.zeros_like(p)
    Optimizer(model, CONFIG, OptimRecipe(weight_decay=0.1)).step(0.5)
    for name, p in model.named_parameters():
        expected = 1.0 if name in undecayed else 1 - 0.5 * 0.1
        torch.testing.assert_close(p.detach(), torch.full_like(p, expected), rtol=0, atol=1e-15, msg=name)


def test_adamw_equals_torch():
    ours = {f"p{i}": nn.Parameter(torch.randn(3, 4 + i, dtype=torch.float64)) for i in range(3)}
    theirs = [nn.Parameter(p.detach().clone()) for p in ours.values()]
    torch_adamw = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    group = AdamW(list(ours), ours, 0.1)
    for count in range(1, 6):
        for p, q in zip(ours.values(), theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        torch_adamw.step()
        group.step(0.01, count)
    for p, q in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)


def some_steps(optimizer, model, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step(0.01)


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw"}, {"optimizer": "muon"}], ids=str)
def test_state_comes_back_bit_for_bit(settings):
    optim = OptimRecipe(**settings)
    unbroken, broken = K3.initialised(CONFIG, 1), K3.initialised(CONFIG, 1)
    some_steps(Optimizer(unbroken, CONFIG, optim), unbroken, range(4))
    first = Optimizer(broken, CONFIG, optim)
    some_steps(first, broken, range(2))
    second = Optimizer(broken, CONFIG, optim)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    some_steps(second, broken, range(2, 4))
    for (name, p), q in zip(unbroken.named_parameters(), broken.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_foreign_state_is_refused():
    model = K3.initialised(CONFIG, 0)
    optimizer = Optimizer(model, CONFIG, OptimRecipe())
    state = dict(optimizer.state_dict())
    name = "momentum.model.layers.0.self_attn.q_proj.weight"
    tensor = state.pop(name)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"is \[1, 32, 64\], expected \[2, 32, 64\]"):
        optimizer.load_state_dict(state | {name: tensor[:1]})
    with pytest.raises(ValueError, match="extra is unknown"):
        optimizer.load_state_dict(state | {name: tensor, "extra": tensor})


def test_narrow_masters_are_refused():
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight is torch.bfloat16; masters are float32 or float64"
    ):
        Optimizer(K3.initialised(CONFIG, 0).bfloat16(), CONFIG, OptimRecipe())


def test_big_groups_are_cut_into_buckets_with_the_same_result(monkeypatch):
    together, apart = K3.initialised(CONFIG, 1), K3.initialised(CONFIG, 1)
    some_steps(Optimizer(together, CONFIG, OptimRecipe()), together, range(2))
    monkeypatch.setattr("openk3.train.muon.BUCKET_ELEMENTS", 1)
    optimizer = Optimizer(apart, CONFIG, OptimRecipe())
    assert len(optimizer.buckets) == len(optimizer.plan.muon)
    some_steps(optimizer, apart, range(2))
    for (name, p), q in zip(together.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6, msg=name)
