"""The training experiments: what they compute from metrics, and that tables and figures follow from the record."""

import json
import math
import statistics

import pytest

from openk3.evals import experiments
from openk3.evals.experiments import (
    attnres_depth,
    balance_in_training,
    base,
    compare,
    draw,
    k3_vs_k2like,
    situ_vs_swiglu,
    swaps,
)
from openk3.evals.experiments.pool import Job, Outcome
from openk3.model.audit import audit
from openk3.train.recipe import load_recipe

ENDED = {"date": "2026-01-02", "versions": base.versions(), "cpu": "test", "cores": 1, "jobs": 1, "seconds": 9.0}


def train_lines(steps=30, **fields):
    made = {"loss": lambda s: 8 / s, "grad_norm": lambda s: 1.0, "maxvio": lambda s: [1 / s, 2 / s],
            "dead": lambda s: [0, int(s == 1)], "q": lambda s: 100.0} | fields  # fmt: skip
    return [{"kind": "train", "step": s} | {name: f(s) for name, f in made.items()} for s in range(1, steps + 1)]


def outcome(job, bpb, diverged="", **fields):
    sites = [{"site": name, "weights": [0.25, 0.75]} for name in ("layers.0.mlp", "layers.13.mlp", "output")]
    records = {"corpus": [{"hash": "c" * 64}], "train": train_lines(**fields), "probe": [{"attnres": sites}]}
    return Outcome(job, None, records | {"eval": [{"bpb": bpb, "step": 30}]}, diverged, ENDED)


@pytest.fixture
def conducted(monkeypatch, tmp_path):
    """A function: module and outcome of each job -> the record, with table and figure written."""

    def conduct(module, outcome_of):
        monkeypatch.setattr(module, "run_all", lambda jobs, n, work: {job.label: outcome_of(job) for job in jobs})
        record, table, figure = base.conduct(module.EXPERIMENT, 1, tmp_path / "out", tmp_path / "work")
        text = figure.read_text()
        base.write(module.EXPERIMENT, json.loads(record.read_text()), tmp_path / "out")
        assert figure.read_text() == text and text.startswith("<svg") and "var(--s0, #0e6fa8)" in text
        return json.loads(record.read_text()), table.read_text()

    return conduct


def test_names_and_modules_agree():
    assert [name for name, _ in experiments.questions()] == [name.replace("_", "-") for name in experiments.NAMES]


def test_noise_floor_is_a_95_percent_interval():
    stats = pytest.importorskip("scipy.stats")
    a, b = [1.0, 1.2, 1.1], [2.0, 2.1, 2.5]
    interval = stats.ttest_ind(a, b).confidence_interval(0.95)
    assert compare.noise_floor(a, b) == pytest.approx((interval.high - interval.low) / 2, rel=1e-3)
    for freedom, value in compare.T_975.items():
        assert value == pytest.approx(stats.t.ppf(0.975, freedom), abs=6e-4)
    assert compare.look_bound(3) == pytest.approx(4.303 * math.sqrt(4 / 3))
    with pytest.raises(ValueError, match="not known"):
        compare.spread([1.0])


@pytest.mark.parametrize("changes", [swap.model for swap in swaps.SWAPS])
def test_swaps_are_at_equal_active_parameters_by_expert_width_alone(changes):
    nano = load_recipe("nano").model
    swapped = load_recipe("nano", compare.rematched("nano", changes)).model
    assert abs(audit(swapped).active / audit(nano).active - 1) < 0.01
    assert swapped.replace(moe_intermediate_size=64) == nano.replace(**changes)


def test_training_flops_of_a_layer_kind():
    nano = load_recipe("nano").model
    assert compare.training_flops(nano.replace(attention="kda"), 10, 512) == compare.training_flops(
        nano.replace(attention="kda"), 10, 1024
    )
    mla = nano.replace(attention="mla")
    more = compare.training_flops(mla, 10, 1025) - compare.training_flops(mla, 10, 1023)
    assert more == 10 * 3 * 2 * 5 * 4 * (48 + 32)  # one pair more: 5 layers, 4 heads, key and value widths


def test_k3_vs_k2like_takes_each_at_its_best_rate(conducted):
    def outcome_of(job):
        recipe = job.resolved()
        lowest = 4e-3 if recipe.model.attention == "hybrid" else 2e-3
        start = 1.9 if recipe.model.attention == "hybrid" else 2.0
        return outcome(job, start + 10 * abs(recipe.optim.lr - lowest) + recipe.train.seed / 100)

    record, table = conducted(k3_vs_k2like, outcome_of)
    summary = record["summary"]
    assert summary["K3"]["lr"] == 4e-3 and not summary["K3"]["lr_at_edge"]
    assert summary["K2-like"]["lr"] == 2e-3 and summary["K2-like"]["lr_at_edge"]
    assert summary["K3"]["bpb"] == pytest.approx([1.9, 1.91, 1.92]) and summary["K3"]["spread"] == pytest.approx(0.01)
    assert summary["gap"] == pytest.approx(-0.1) and summary["verdict"] == "K3 lower"
    assert "exceeds the noise floor" in table and "best rate of K2-like lies at the edge" in table
    assert len(record["rows"]) == 10 and record["checklist"] == list(k3_vs_k2like.EXPERIMENT.rows)


def test_k3_vs_k2like_says_when_it_is_noise(conducted):
    record, table = conducted(k3_vs_k2like, lambda job: outcome(job, 2.0 + job.resolved().train.seed / 10))
    assert record["summary"]["verdict"] == "within noise" and "does not exceed" in table


def test_a_rate_that_diverged_is_not_the_best(conducted):
    def outcome_of(job):
        hot = job.resolved().optim.lr > 5e-3
        return outcome(job, 2.0 + job.resolved().train.seed / 10, "step 9: the loss is not finite" if hot else "")

    record, table = conducted(k3_vs_k2like, outcome_of)
    assert record["summary"]["K3"]["lr"] == 2e-3 and table.count("diverged") == 2


def test_swaps_tell_what_lies_beyond_chance(conducted):
    def outcome_of(job):
        value = {"SwiGLU": 2.5, "AdamW": 1.5, "RoPE in MLA": 2.04}.get(job.label, 2.0)
        seed = job.resolved().train.seed
        return outcome(job, value + (seed - 1) / 100 if job.label.startswith("K3") else value,
                       "step 2: x is not finite" if job.label == "all KDA" else "")  # fmt: skip

    record, table = conducted(swaps, outcome_of)
    summary = record["summary"]
    assert (summary["mean"], summary["spread"]) == pytest.approx((2.0, 0.01))
    assert set(summary["worse"]) == {"SwiGLU", "all KDA"} and summary["better"] == ["AdamW"]
    found = {r["label"]: r for r in record["rows"]}
    assert found["RoPE in MLA"]["spreads"] == pytest.approx(4.0) and not found["RoPE in MLA"]["clear"]
    assert found["AdamW"]["difference"] == pytest.approx(-0.5) and found["AdamW"]["q"] == 100
    assert found["SwiGLU"]["maxvio"] == pytest.approx(statistics.fmean(1.5 / s for s in range(6, 31)))
    assert "| all KDA | diverged | diverged |" in table


def test_balance_is_compared_step_by_step(conducted):
    curves = {"quantile": lambda s: [0.4, 0.2] if s > 3 else [2.0, 2.0], "sign": lambda s: [3 / s, 3 / s],
              "none": lambda s: [2.0, 3.0]}  # fmt: skip
    record, table = conducted(
        balance_in_training, lambda job: outcome(job, 2.0, maxvio=curves[job.resolved().balance.rule])
    )
    summary = record["summary"]
    assert [summary[rule]["settled"] for rule in curves] == [4, 7, None]
    assert summary["quantile"]["at_goal_step"] == pytest.approx(0.3)
    assert summary["steps_compared"] == 29
    assert summary["steps_not_below"] == [2, 3, *range(10, 31)]
    assert summary["quantile"]["dead_expert_steps"] == 1 and summary["noise"] == pytest.approx(0.3)
    assert "at 6 of 29 steps" in table and "is below the goal" in table and "never" in table


def test_spikes_are_measured_by_the_run_itself():
    calm = [9.0] * 10 + [1.0] * 20
    assert situ_vs_swiglu.spikes(calm)["spikes"] == 0
    found = situ_vs_swiglu.spikes([*calm, 2.9, 3.1, 30.0])
    assert found == {"grad_median": 1.0, "grad_largest": 30.0, "grad_ratio": 30.0, "spikes": 2}


def test_situ_and_swiglu_by_rate(conducted):
    def outcome_of(job):
        recipe = job.resolved()
        scale = 1.0 if recipe.model.activation == "situ" else 1000 * recipe.optim.lr
        hot = recipe.model.activation == "swiglu" and recipe.optim.lr > 0.05
        fields = {"act_experts": lambda s: scale * s, "act_mlp": lambda s: 2 * scale * s, "w_max": lambda s: 1.0}
        return outcome(job, 2.0, "step 31: x is not finite" if hot else "", **fields)

    record, table = conducted(situ_vs_swiglu, outcome_of)
    hottest = record["summary"]["by_rate"]["0.064"]
    assert hottest["diverged"] == ["SwiGLU"] and hottest["bpb_difference"] is None
    assert hottest["largest_ratio"] == pytest.approx({"act_experts": 64, "act_mlp": 64})
    assert record["rows"][0]["largest"] == {"act_experts": 30.0, "act_mlp": 60.0}
    assert "diverged after step 30" in table


def test_depth_profiles(conducted):
    def outcome_of(job):
        recipe = job.resolved()
        steep = 1.0 if recipe.model.residual == "block" else 3.0
        fields = {"out_grad": lambda s: [1.0, 2.0, 4.0 * steep], "out_rms": lambda s: [1.0, 1.0, steep]}
        return outcome(job, 2.0 + (steep - 1) / 10 + recipe.train.seed / 100, **fields)

    record, table = conducted(attnres_depth, outcome_of)
    summary = record["summary"]
    assert summary["block AttnRes"]["grad_unevenness"] == 4 and summary["plain residual"]["grad_unevenness"] == 12
    assert summary["plain residual"]["rms_unevenness"] == 3
    assert summary["gap"] == pytest.approx(-0.2) and summary["embedding_share_late"] == 0.25
    assert record["rows"][0]["attnres"] and not record["rows"][1]["attnres"]
    assert "exceeds the noise floor" in table


def test_profile_takes_lines_that_were_seen():
    lines = [[float(i), 2.0] for i in range(8)]
    assert attnres_depth.profile(lines) == {"first": [0.0, 2.0], "middle": [4.0, 2.0], "last": [6.5, 2.0]}


@pytest.mark.parametrize("module", [k3_vs_k2like, swaps, balance_in_training, situ_vs_swiglu, attnres_depth])
def test_runs_fit_their_budget(module, monkeypatch, tmp_path):
    """Every run resolves, reads all held-out text once, and at the end."""
    asked = []

    def stop(jobs, n, work):
        asked.extend(jobs)
        raise InterruptedError

    monkeypatch.setattr(module, "run_all", stop)
    with pytest.raises(InterruptedError):
        module.EXPERIMENT.run(tmp_path, 1)
    for job in asked:
        recipe = job.resolved()
        assert isinstance(job, Job) and recipe.steps < recipe.train.eval_every and recipe.train.eval_tokens > 0
        assert recipe.steps * recipe.train.batch_tokens <= 1_004_000


def test_means_over_the_last_steps():
    assert draw.smooth([1.0, 3.0, 5.0, 7.0], 2).tolist() == [1.0, 2.0, 4.0, 6.0]


def test_lists_of_numbers_stand_on_one_line():
    record = {"a": [1, -2.5e-07, 3], "b": [[1, 2], [3]], "c": ["x", "y"], "d": {"e": []}}
    text = base.dumps(record)
    assert json.loads(text) == record and '"a": [1, -2.5e-07, 3]' in text
    with pytest.raises(ValueError, match="JSON"):
        base.dumps({"a": math.nan})
