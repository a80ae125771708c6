"""What the probe reads, against the definitions, and that it leaves the model alone."""

import math

import pytest
import torch

from openk3.config import named
from openk3.data.loader import Batch
from openk3.model.k3 import K3
from openk3.ops.attnres import attnres_weights
from openk3.train.probe import half_life, probe, sites

CONFIG = named("pico")


def model(**changes):
    built = K3.initialised(CONFIG.replace(**changes), 0).double().train()
    generator = torch.Generator().manual_seed(1)
    for name, p in built.named_parameters():
        if "res_proj" in name:
            p.data.normal_(0, 0.3, generator=generator)
    return built


def batch(n=60):
    tokens = torch.randint(0, CONFIG.vocab_size, (n,), generator=torch.Generator().manual_seed(2))
    return Batch(tokens, tokens, torch.tensor([0, 25, n], dtype=torch.int32), n)


@pytest.mark.parametrize(
    ("changes", "n_sources"),
    [
        ({}, [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]),  # blocks of 2 layers: embedding, two finished, the running sum
        ({"residual": "full"}, list(range(2, 12))),
        ({"residual": "plain"}, []),
    ],
)
def test_depth_weights_are_means_of_the_softmax_over_the_sources(changes, n_sources):
    built = model(**changes)
    lines = probe(built, batch(), {})["attnres"]
    names = [name for name, site in sites(built) if site.mixes]
    assert [line["site"] for line in lines] == names
    assert len(lines) == len(n_sources)
    assert sorted(len(line["weights"]) for line in lines) == n_sources
    for line in lines:
        assert sum(line["weights"]) == pytest.approx(1, abs=1e-12)
        assert max(line["weights"]) - min(line["weights"]) > 1e-3


def test_the_last_read_by_hand():
    built, seen = model(), []
    site = built.model.output_site
    op = site.op
    site.op = lambda sources, *rest: seen.append(list(sources)) or op(sources, *rest)
    weights = probe(built, batch(), {})["attnres"][-1]["weights"]
    query, gamma = built.model.output_attn_res_proj.weight.flatten(), built.model.output_attn_res_norm.weight
    expected = attnres_weights(seen[0], query, gamma, CONFIG.rms_norm_eps).mean(1)
    torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", ["bounded", "softplus"])
def test_half_lives_at_the_start_follow_from_the_decay_bias(decay):
    """With the decay logits at zero every token forgets alike, so the half-life has a closed form."""
    built = model(decay=decay)
    for layer in (0, 1, 2):
        built.model.layers[layer].self_attn.f_b_proj.weight.data.zero_()
    lines = probe(built, batch(), {})["half_lives"]
    assert [line["layer"] for line in lines] == [0, 1, 2]
    for line in lines:
        bias = built.model.layers[line["layer"]].self_attn.dt_bias.detach().view(2, 32)
        g = -5 * torch.sigmoid(bias) if decay == "bounded" else -torch.log1p(bias.exp())
        for head, (quantiles, values) in enumerate(zip(line["heads"], math.log(0.5) / g, strict=True)):
            ordered = values.sort().values
            assert len(line["heads"]) == 2, head
            assert quantiles[0] == pytest.approx(ordered[0].item(), rel=1e-6)
            assert quantiles[4] == pytest.approx(ordered[-1].item(), rel=1e-6)
            assert quantiles[2] == pytest.approx(ordered.quantile(0.5).item(), rel=1e-6)
            assert quantiles == sorted(quantiles)
            assert quantiles[0] > 0


def test_a_channel_that_never_fades_has_a_finite_half_life():
    assert torch.isfinite(half_life(torch.tensor([0.0, -1e-30]))).all()
    assert half_life(torch.tensor([-math.log(2)])).item() == pytest.approx(1)


def test_half_life_is_that_of_the_mean_log_decay_on_this_text():
    built, seen = model(), []
    attention = built.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    quantiles = probe(built, batch(), {})["half_lives"][1]["heads"][1]
    mean = attention.log_decay(seen[0])[:, 1].mean(0)
    assert quantiles[4] == pytest.approx((math.log(0.5) / mean).max().item(), rel=1e-9)


def test_update_norms_pass_through_and_nothing_stays_behind():
    built = model()
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    norms = {"model.layers.0.self_attn.q_proj.weight": torch.tensor([1.0, 2.0])}
    lines = probe(built, batch(), norms)["update_norms"]
    assert lines == [{"name": "model.layers.0.self_attn.q_proj.weight", "heads": [1.0, 2.0]}]
    assert built.training
    assert all(site.observer is None for _, site in sites(built))
    assert not any(module._forward_pre_hooks for module in built.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.state_dict().items())
