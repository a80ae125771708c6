"""Newton-Schulz, the update rule, and what splitting by head is good for."""

import pytest
import torch
from torch import nn

from openk3.config import named
from openk3.model.k3 import K3
from openk3.train.muon import Bucket, newton_schulz, update_scale
from openk3.train.optim import Optimizer
from openk3.train.parameters import Part
from openk3.train.recipe import OptimRecipe

CONFIG = named("pico")


def polar(x):
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.row(94)
@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (16, 48), (48, 16)])
def test_singular_values_come_near_one_in_the_same_singular_spaces(rows, columns):
    x = random(3, rows, columns)
    y = newton_schulz(x)
    for block, result in zip(x, y, strict=True):
        u, _, vh = torch.linalg.svd(block, full_matrices=False)
        inner = u.T @ result @ vh.T
        values = inner.diagonal()
        torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-10)
        assert values.min() > 0.3 and values.max() < 1.25
        assert torch.linalg.norm(result - polar(block)) / torch.linalg.norm(polar(block)) < 0.35


def test_a_convergent_polynomial_gives_the_exact_polar_factor():
    x = random(2, 20, 30)
    y = newton_schulz(x, steps=60, coefficients=(1.5, -0.5, 0.0))
    torch.testing.assert_close(y, torch.stack([polar(b) for b in x]), rtol=0, atol=1e-12)


def test_blocks_do_not_see_each_other_nor_their_scale():
    x = random(4, 12, 20)
    alone = torch.cat([newton_schulz(block[None]) for block in x])
    torch.testing.assert_close(newton_schulz(x), alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(newton_schulz(x * 1e-3), alone, rtol=0, atol=1e-12)


def test_a_block_without_gradient_stays_zero():
    assert newton_schulz(torch.zeros(2, 4, 4)).eq(0).all()


def test_the_scale_makes_an_orthogonal_block_of_rms_a_fifth():
    for rows, columns in [(32, 128), (64, 64), (96, 24)]:
        block = polar(random(rows, columns)) * update_scale(rows, columns)
        assert block.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-9)


@pytest.mark.row(94)
def test_against_torch_muon():
    """Three steps of one matrix. Torch iterates in bf16 and keeps a running mean, which has the same direction."""
    ours = nn.Parameter(random(16, 40, dtype=torch.float32))
    theirs = nn.Parameter(ours.detach().clone())
    torch_muon = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    bucket = Bucket([Part("x", 1, 16, 40)], {"x": ours}, weight_decay=0.1)
    for step in range(3):
        before = ours.detach().clone()
        ours.grad = random(16, 40, seed=step + 1, dtype=torch.float32)
        theirs.grad = ours.grad.clone()
        torch_muon.step()
        with torch.no_grad():
            bucket.step(0.02)
        moved = (ours - before).norm()
    assert (ours - theirs).norm() < 0.04 * moved


def one_step(model, optim, lr=0.01):
    optimizer = Optimizer(model, CONFIG, optim)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms = optimizer.step(lr, measure=True)
    return before, norms


def model_with_gradients(seed=0):
    model = K3.initialised(CONFIG, seed).double()
    for i, p in enumerate(model.parameters()):
        p.grad = random(*p.shape, seed=i)
    return model


@pytest.mark.row(94)
def test_the_optimizer_applies_the_written_rule_to_every_kind_of_block():
    model = model_with_gradients()
    before, _ = one_step(model, OptimRecipe())
    heads = {"layers.1.self_attn.q_proj": 2, "layers.3.self_attn.q_b_proj": 2, "layers.4.self_attn.kv_b_proj": 2}
    for name, p in model.named_parameters():
        blocks = next((n for part, n in heads.items() if part in name), None)
        if name.endswith("experts.w2"):
            blocks = CONFIG.num_experts
        elif name.endswith(
            ("self_attn.o_proj.weight", "block_sparse_moe.gate.weight", "shared_experts.up_proj.weight")
        ):
            blocks = 1
        if blocks is None:
            continue
        grad = p.grad.reshape(blocks, -1, p.shape[-1])
        update = newton_schulz(grad * 1.95) * update_scale(*grad.shape[1:])
        expected = (1 - 0.01 * 0.1) * before[name] - 0.01 * update.reshape(p.shape)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.row(95)
def test_scaling_one_head_by_100_changes_no_update_but_rounding():
    names = [f"model.layers.{i}.self_attn.{m}_proj.weight" for i in range(3) for m in "qkv"]
    names += [f"model.layers.{i}.self_attn.{m}_b_proj.weight" for i in (3, 4) for m in ("q", "kv")]
    plain, scaled = model_with_gradients(), model_with_gradients()
    for name, p in scaled.named_parameters():
        if name in names:
            p.grad.view(2, -1)[1] *= 100
    _, norms = one_step(plain, OptimRecipe())
    _, norms_scaled = one_step(scaled, OptimRecipe())
    assert set(norms) == set(names)
    for name in names:
        torch.testing.assert_close(norms_scaled[name], norms[name], rtol=1e-9, atol=0)
        assert norms[name].max() / norms[name].min() < 1.2
    for (name, p), q in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")

    scaled = model_with_gradients()
    for name, p in scaled.named_parameters():
        if name in names:
            p.grad.view(2, -1)[1] *= 100
    _, whole = one_step(scaled, OptimRecipe(optimizer="muon"))
    assert max((whole[name][1] / whole[name][0]).item() for name in names) > 1.3


def head_ratio(x, blocks):
    """Update norm of the scaled first head over the mean of the others; x [12 * 64, 768]."""
    update = newton_schulz(x.view(blocks, -1, 768)).reshape(12, -1)
    norms = update.norm(dim=1)
    return (norms[0] / norms[1:].mean()).item()


@pytest.mark.row(96)
@pytest.mark.parametrize(("gap", "whole"), [(1, 1.00), (10, 0.86), (100, 1.44), (1000, 13.2)])
def test_whole_matrix_dominance(gap, whole):
    """Twelve heads of 64 x 768, one scaled: with five steps the others stay behind; a block a head never does."""
    x = random(768, 768, dtype=torch.float32)
    x[:64] *= gap
    assert head_ratio(x, 1) == pytest.approx(whole, rel=0.05)
    assert head_ratio(x, 12) == pytest.approx(1.00, abs=0.01)
    exact = polar(x).view(12, -1).norm(dim=1)
    assert (exact[0] / exact[1:].mean()).item() == pytest.approx(1.00, abs=0.01)


@pytest.mark.row(96)
def test_the_exact_polar_factor_of_a_tall_matrix_stays_below_one_and_a_half():
    x = random(768, 384, dtype=torch.float32)
    x[:64] *= 1000
    exact = polar(x).view(12, -1).norm(dim=1)
    assert 1.4 < (exact[0] / exact[1:].mean()).item() < 1.5
