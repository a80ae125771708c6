"""Observers see the right numbers, and leave the run as it would have been."""

import json

import pytest
import torch

from openk3.errors import UserError
from openk3.train import watch
from openk3.train.loop import train


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "train"]


@pytest.fixture(scope="module")
def unobserved(make_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    train(make_recipe(), folder, progress=False)
    return lines(folder)


@pytest.mark.parametrize("name", sorted(watch.OBSERVERS))
def test_an_observed_run_learns_the_same(make_recipe, tmp_path, unobserved, name):
    train(make_recipe(), tmp_path, progress=False, watch=watch.observer(name))
    observed = lines(tmp_path)
    assert [line["loss"] for line in observed] == [line["loss"] for line in unobserved]
    assert [line["grad_norm"] for line in observed] == [line["grad_norm"] for line in unobserved]
    assert observed[0].keys() > unobserved[0].keys()


def test_largest_activation_is_that_of_every_down_projection(make_recipe, tmp_path):
    """Scaled down projections' inputs are seen where they are made: in each kind of FFN, in training alone."""
    by_step, seen = [], []

    def watching(run):
        fields = watch.activations(run)
        layer = run.model.model.layers[1]
        layer.block_sparse_moe.shared_experts.down_proj.register_forward_pre_hook(
            lambda module, x: seen.append(float(x[0].detach().abs().max())) if module.training else None
        )
        inner = layer.block_sparse_moe.experts.act
        layer.block_sparse_moe.experts.act = lambda gate, up: inner(gate * 1e3, up * 1e3)  # SiTU saturates at 100
        return lambda: by_step.append(fields()) or {}

    train(make_recipe("train.steps=2", "train.micro_tokens=64"), tmp_path, progress=False, watch=watching)
    assert len(by_step) == 2 and len(seen) == 4  # two micro-batches a step; evaluation is not seen
    assert all(line["act_mlp"] >= max(seen[2 * i : 2 * i + 2]) > 0 for i, line in enumerate(by_step))
    assert all(50 < line["act_experts"] <= 100.001 for line in by_step)
    assert all(line["w_max"] > 0 for line in by_step)


def test_gradient_by_depth_is_that_of_the_mean_loss(make_recipe, tmp_path):
    """Against autograd on the same first batch."""
    kept = {}

    def watching(run):
        fields = watch.depth(run)
        gradients = kept.setdefault("gradients", {})

        def see(place):
            def hook(module, inputs, out):
                if module.training:
                    out.register_hook(lambda g: gradients.update({place: gradients.get(place, g.clone())}))

            return hook

        for i, layer in enumerate(run.model.model.layers):
            layer.self_attn.register_forward_hook(see(2 * i))
            getattr(layer, layer.ffn_name).register_forward_hook(see(2 * i + 1))
        return lambda: kept.setdefault("lines", []).append(fields()) or {}

    train(make_recipe("train.steps=8", "optim.clip=1e-9"), tmp_path, progress=False, watch=watching)
    steps = [i for i, line in enumerate(kept["lines"]) if line]
    assert steps == [0, 5, 7]
    first = kept["lines"][0]
    expected = [float(torch.linalg.vector_norm(kept["gradients"][place].double())) for place in range(6)]
    assert first["out_grad"] == pytest.approx(expected, rel=1e-9)
    assert all(x > 0 for x in first["out_rms"]) and len(first["out_rms"]) == 6


def test_an_unknown_observer_is_told(make_recipe):
    with pytest.raises(UserError, match="the observers are activations, depth"):
        watch.observer("deep")
