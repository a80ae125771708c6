"""The training benchmark: what it counts is arithmetic, its peer is a real model, its profile adds up."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from openk3.cli import app
from openk3.config import named
from openk3.evals.bench import flops
from openk3.evals.bench.groups import MARK, NODE, OTHER, by_group, self_times
from openk3.evals.bench.peer import blocked, matching_inner, peer_parameters, plain_transformer
from openk3.evals.bench.train import k3_contender, plain_contender, race, row, setting, token_ids
from openk3.model.audit import audit
from openk3.model.k3 import K3
from openk3.train.muon import newton_schulz


def peer(context=16, **more):
    config = named("pico")
    return plain_transformer(config, audit(config).active, context, 0, **more)


@pytest.mark.parametrize("size", ["pico", "nano", "mini"])
def test_the_peer_has_the_active_parameters_of_k3_within_one_percent(size):
    config = named(size)
    active = audit(config).active
    assert abs(peer_parameters(config, matching_inner(config, active)) / active - 1) < 0.01


def test_the_parameters_of_a_peer_are_those_of_its_tensors():
    model = peer()
    config = named("pico")
    counted = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed_tokens"))
    assert counted == peer_parameters(config, matching_inner(config, audit(config).active))


def test_no_peer_is_smaller_than_its_attention():
    with pytest.raises(ValueError, match="without FFN already has"):
        matching_inner(named("pico"), 1000)


@pytest.mark.parametrize("more", [{}, {"attend": blocked}, {"heads": 1}])
def test_the_peer_is_causal_and_keeps_sequences_apart(more):
    model = peer(**more)
    tokens = torch.randint(0, 768, (2, 16), generator=torch.Generator().manual_seed(1))
    before = model(tokens)
    tokens[0, 9] += 1
    changed = (model(tokens) - before).abs().amax(1).view(2, 16)
    assert torch.equal(changed[0, :9], torch.zeros(9))
    assert (changed[0, 9:] > 0).all()
    assert torch.equal(changed[1], torch.zeros(16))


def test_both_attentions_of_the_peer_agree():
    tokens = torch.randint(0, 768, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(peer()(tokens), peer(attend=blocked)(tokens))


def test_order_matters_to_the_peer():
    tokens = torch.randint(0, 768, (1, 16), generator=torch.Generator().manual_seed(1))
    swapped = tokens.clone()
    swapped[0, [2, 3]] = tokens[0, [3, 2]]
    a, b = peer()(tokens), peer()(swapped)
    assert (a[15] - b[15]).abs().max() > 1e-6  # attention without positions sees a set


def plain_adamw(s):
    return plain_contender(s, "AdamW")


def plain_muon(s):
    return plain_contender(s, "Muon")


@pytest.mark.parametrize("make", [k3_contender, plain_adamw, plain_muon])
def test_every_contender_trains(make):
    contender = make(setting("pico", 64, 32))
    losses = [contender.step() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.3


def test_projections_of_a_small_k3_by_hand():
    config = named("pico")
    d, p, v, h = 64, 64, 768, 2
    kda = 3 * d * p + d * 32 + 32 * p + d * h + d * p + p * d  # q k v, decay down and up, beta, gate, output
    mla = d * 32 + 32 * h * 48 + d * (32 + 16) + 32 * h * (32 + 32) + d * h * 32 + h * 32 * d
    moe = d * 8 + 2 * d * 32 + 2 * 3 * 32 * 32 + 3 * d * (2 * 32)  # router, latent, two of eight, shared
    dense = 3 * d * 128
    model = K3.initialised(config, 0)
    assert flops.projections(model) == 2 * (3 * kda + 2 * mla + 4 * moe + dense + d * v)


def test_attention_and_delta_rule_by_hand():
    assert flops.causal_attention(6, 3, heads=2, qk=5, v=7) == 2 * 2 * (5 + 7) * (1 + 2 + 3) * 2
    assert flops.delta_rule(1, 1, k=32, v=32, chunk=32) == 6 * 32 * 32 + 4 * 32 * 64 + 32 * 32 // 3


def test_newton_schulz_counts_what_runs():
    with FlopCounterMode(display=False) as seen:
        newton_schulz(torch.randn(3, 8, 4))
    assert flops.newton_schulz([(3, 8, 4)]) == seen.get_total_flops()


def test_a_forward_of_the_peer_counts_what_runs():
    model = peer()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as seen:
        torch.nn.functional.linear(model(tokens), model.lm_head.weight)
    assert flops.projections(model) * 32 == seen.get_total_flops()  # the counter does not know the fused attention
    counted = flops.plain_step(model, 32, 16)
    assert counted.projections == 3 * seen.get_total_flops()
    assert counted.attention == 3 * 5 * 2 * (2 * 16 * 17 // 2) * 64 * 2


def test_a_forward_of_k3_runs_little_more_than_is_counted():
    s = setting("pico", 512, 256)
    model = K3.initialised(s.recipe.model, 0)
    with FlopCounterMode(display=False) as seen, torch.no_grad():
        model(s.batch.tokens_T, s.batch.cu_seqlens)
    counted = flops.k3_step(model, 512, 256).total / 3
    assert counted < seen.get_total_flops() < 1.35 * counted  # more: running sums, tiles above the diagonal


def test_ids_are_a_pure_function_and_fill_the_vocabulary_unevenly():
    ids = token_ids(768, 4096)
    assert torch.equal(ids, token_ids(768, 4096))
    counts = ids.bincount(minlength=768)
    assert len(counts) == 768
    assert counts[0] > 10 * counts[100:200].float().mean()


@pytest.mark.parametrize("given", [(64, 0), (64, 48), (32, 64)])
def test_sequences_must_fill_the_step(given):
    with pytest.raises(ValueError, match="not a whole number of sequences"):
        setting("pico", *given)


def test_the_profile_knows_forward_and_backward_and_leaves_the_model_as_it_was():
    contender = k3_contender(setting("pico", 64, 32))
    groups = by_group(contender.model, contender.step, 1)
    assert set(groups) >= {
        "KDA: recurrence", "KDA: short convolution", "KDA: projections, gate, head norm", "MLA: attention",
        "MLA: projections, gate", "AttnRes", "routed experts", "router, balance", "latent projections",
        "shared experts, dense FFN", "norms", "head, loss", "optimizer", "other",
    }  # fmt: skip
    assert all(ms > 0 for ms in groups.values())
    assert all("forward" not in vars(module) for module in contender.model.modules())


def event(name, own, *children, sequence=-1, start=0):
    found = SimpleNamespace(name=name, self_cpu_time_total=own, cpu_children=children, sequence_nr=sequence)
    found.cpu_parent, found.time_range = None, SimpleNamespace(start=start)
    for child in children:
        child.cpu_parent = found
    return found


def test_a_backward_belongs_to_the_group_of_its_forward():
    view = event("aten::view", 1, sequence=7)  # made no node: number 7 is still free
    norm = event(MARK + "norms", 2, event("aten::rms_norm", 10, event("aten::mul", 5), sequence=7))
    nodes = [event(NODE + "MulBackward0", 20, event("aten::mul", 30, sequence=7), sequence=7), event(NODE + "Lost", 40)]
    root = event(MARK + OTHER, 100, view, norm, *nodes)
    events = [root, view, norm, *nodes, *norm.cpu_children, event("aten::outside", 1000)]
    assert self_times(events) == {OTHER: 100 + 1 + 40, "norms": 2 + 10 + 5 + 20 + 30}


def test_the_verb_races_and_writes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr("openk3.evals.bench.train.WARM_UP", 1)
    out = tmp_path / "deep" / "train.json"
    call = ["bench", "train", "--size", "pico", "--tokens", "64", "--context", "32", "--steps", "1", "--no-compile"]
    done = CliRunner().invoke(app, [*call, "--out", str(out)])
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["command"] == "openk3 " + " ".join(call)
    assert [r["name"] for r in record["rows"]] == ["pico", "plain", "plain", "plain, blocked", "plain, 64-wide"]
    first, second = record["rows"][:2]
    assert first["k3_over_this"] == 1
    assert second["k3_over_this"] == pytest.approx(first["tokens_per_s"] / second["tokens_per_s"])
    assert first["over_floor"] == pytest.approx(first["ms"] / first["floor_ms"])
    assert first["gflop"] == pytest.approx(sum(first["gflop_by_part"].values()))
    assert set(record["profile"]) == {"pico", "plain"}
    assert {"date", "versions", "cpu", "threads"} <= set(record)


def test_a_compiler_that_fails_is_a_result_and_any_other_failure_is_an_error():
    def fails():
        raise RuntimeError("no such luck\nand more")

    s = setting("pico", 32, 32)
    whole = plain_contender(s, "AdamW")
    broken = dataclasses.replace(whole, name="plain, compiled", step=fails)
    times, failures, rate = race([whole, broken], steps=2, warm_up=1, advance=list)
    assert len(times["plain, AdamW"]) == 2
    assert failures == {"plain, compiled, AdamW": "RuntimeError: no such luck"}
    found = row(broken, s, [], failures["plain, compiled, AdamW"], rate)
    assert found["failed"] == "RuntimeError: no such luck"
    assert "ms" not in found
    with pytest.raises(RuntimeError, match="no such luck"):
        race([dataclasses.replace(whole, step=fails)], steps=1, warm_up=0, advance=list)
