"""Whole runs on a toy corpus: the same losses however often they are stopped, and every way of stopping."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest
import torch
import torch.nn.functional as F

from openk3.chat.tokenizer import Tokenizer
from openk3.errors import Failure, UserError
from openk3.train import loop
from openk3.train.evaluate import nats
from openk3.train.loop import train
from openk3.train.metrics import TIMING
from openk3.train.prepare import start
from openk3.train.recipe import parse_recipe
from openk3.train.state import checkpoints, latest


def records(folder, kind=None):
    """The lines of metrics.jsonl without their timing fields."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in TIMING} for line in lines]
    return [line for line in kept if kind in (None, line["kind"])]


def weights(folder):
    return (latest(folder) / "model").rglob("*.safetensors"), (latest(folder) / "state" / "tensors.safetensors")


def assert_same_run(folder, other):
    assert records(folder) == records(other)
    shards, tensors = weights(folder)
    for file in [*shards, tensors]:
        assert file.read_bytes() == (other / file.relative_to(folder)).read_bytes(), file.name
    for file in (folder / "samples").iterdir():
        assert file.read_bytes() == (other / "samples" / file.name).read_bytes()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, make_recipe):
    """Eight steps in one go, and the recipe."""
    recipe = make_recipe()
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return recipe, folder, train(recipe, folder, progress=False)


def stop_after(monkeypatch, step):
    """Let the next run be interrupted in the middle of a step, as a Ctrl-C would."""
    training_step = loop.training_step

    def interrupted_step(run, **settings):
        if run.step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return training_step(run, **settings)

    monkeypatch.setattr(loop, "training_step", interrupted_step)


def test_a_run_writes_what_the_folder_promises(unbroken):
    recipe, folder, summary = unbroken
    assert (summary.step, summary.steps, summary.tokens, summary.finished) == (8, 8, 8 * 128, True)
    assert not summary.interrupted
    steps = records(folder, "train")
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["tokens"] for line in steps] == [128 * i for i in range(1, 9)]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(len(line["maxvio"]) == len(line["dead"]) == 2 and line["q"] == 128 * 2 / 8 for line in steps)
    assert steps[0]["lr"] == recipe.optim.lr
    assert steps[-1]["lr"] == pytest.approx(recipe.optim.lr / 10)
    assert [line["step"] for line in records(folder, "eval")] == [4, 8]
    assert records(folder, "eval")[-1]["bpb"] == summary.held_out.bpb
    assert summary.held_out.tokens > 128  # the last evaluation reads all held-out text
    corpus = records(folder)[0]
    assert corpus["kind"] == "corpus"
    assert corpus["files"] == 12
    assert 1 < corpus["order5_bpb"] < 8
    assert [f.name for f in checkpoints(folder)] == ["step-00000006", "step-00000008"]
    assert (folder / "config.toml").read_text() == recipe.to_toml()
    assert (folder / "tokenizer.model").read_bytes() == (latest(folder) / "model" / "tiktoken.model").read_bytes()
    samples = json.loads((folder / "samples" / "step-00000008.json").read_text())["samples"]
    assert [(s["prompt"], s["seed"]) for s in samples] == [("ba", 0)]
    assert [line["text"] for line in records(folder, "sample")][-1] == samples[0]["text"]


def test_stopped_and_resumed_once_is_the_unbroken_run(unbroken, tmp_path, monkeypatch):
    recipe, folder, _ = unbroken
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        summary = train(recipe, tmp_path / "run", progress=False)
    assert (summary.step, summary.interrupted, summary.finished) == (5, True, False)
    assert latest(tmp_path / "run").name == "step-00000005"
    assert train(recipe, tmp_path / "run", progress=False).finished
    assert_same_run(folder, tmp_path / "run")


def test_stopped_at_every_single_step_is_the_unbroken_run(unbroken, tmp_path, monkeypatch):
    recipe, folder, _ = unbroken
    for step in range(1, 9):
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            assert train(recipe, tmp_path / "run", progress=False).step == step
    assert_same_run(folder, tmp_path / "run")


def test_signals_are_given_back(unbroken, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop_after(monkeypatch, 1)
    train(unbroken[0], tmp_path / "run", progress=False)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_ctrl_c_stops_at_once_and_goes_back_to_the_last_checkpoint(unbroken, tmp_path, monkeypatch):
    recipe, folder, _ = unbroken
    training_step = loop.training_step

    def twice(run, **settings):
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return training_step(run, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_step", twice)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "run", progress=False)
    assert latest(tmp_path / "run").name == "step-00000003"
    train(recipe, tmp_path / "run", progress=False)
    assert_same_run(folder, tmp_path / "run")


def test_a_finished_run_started_again_changes_nothing(unbroken, tmp_path):
    recipe, folder, _ = unbroken
    shutil.copytree(folder, tmp_path / "run")
    summary = train(recipe, tmp_path / "run", progress=False)
    assert summary.finished
    assert_same_run(folder, tmp_path / "run")


def test_micro_batches_change_the_loss_by_rounding_alone(unbroken, make_recipe, tmp_path):
    _, folder, _ = unbroken
    train(make_recipe("train.micro_tokens=64"), tmp_path / "run", progress=False)
    for ours, theirs in zip(records(tmp_path / "run", "train"), records(folder, "train"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
    assert records(tmp_path / "run", "train")[0]["maxvio"] == records(folder, "train")[0]["maxvio"]


def train_text(recipe, folder):
    train(parse_recipe(recipe), folder, progress=False)


def test_killed_at_random_moments_the_run_ends_as_the_unbroken_one(unbroken, tmp_path):
    """SIGKILL while the process trains, evaluates or saves; benchmarks/kill_resume.py does it twenty times."""
    recipe, folder, _ = unbroken
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openk3.train.loop"])  # imported once for all processes
    rng, metrics, codes = random.Random(11), tmp_path / "run" / "metrics.jsonl", []
    for kill in (True, True, True, False):
        before = metrics.stat().st_size if metrics.exists() else 0
        process = context.Process(target=train_text, args=(recipe.to_toml(), tmp_path / "run"))
        process.start()
        while kill and process.is_alive() and not (metrics.exists() and metrics.stat().st_size != before):
            time.sleep(0.005)
        if kill:
            time.sleep(rng.uniform(0, 0.2))
            process.kill()
        process.join(timeout=300)
        codes.append(process.exitcode)
    assert codes[0] == -signal.SIGKILL
    assert codes[-1] == 0
    assert_same_run(folder, tmp_path / "run")


def test_another_recipe_or_corpus_is_refused(unbroken, make_recipe, tmp_path, corpus_folder):
    _, folder, _ = unbroken
    with pytest.raises(UserError, match=r"was trained with optim.lr = 0.005, not 0.001"):
        train(make_recipe("optim.lr=1e-3"), folder, progress=False)

    shutil.copytree(corpus_folder, tmp_path / "text")
    changed = make_recipe(f"data.source={tmp_path}/text/*.txt", "train.steps=2")
    train(changed, tmp_path / "run", progress=False)
    (tmp_path / "text" / "new.txt").write_text("ba co di fu ga\n" * 50)
    with pytest.raises(
        UserError, match=r"the text of data.source has changed since .*step-00000002 \(corpus [0-9a-f]{12}"
    ):
        train(changed, tmp_path / "run", progress=False)


def test_wrong_data_is_told_in_the_words_of_the_recipe(make_recipe, tmp_path):
    (tmp_path / "short.txt").write_text("aaaa")
    for overrides, words in [
        (["data.source=nowhere/*.txt"], r"data.source: no file matches .*nowhere"),
        ([f"data.source={tmp_path}/short.txt"], r"\[data\] the corpus gives \d+ merges"),
        (["data.tokenizer=no.model"], r"data.tokenizer: there is no file no.model"),
        ([f"data.tokenizer={tmp_path}"], r"data.tokenizer: .* cannot be read, Is a directory"),
    ]:
        with pytest.raises(UserError, match=words):
            train(make_recipe(*overrides), tmp_path / f"run{len(words)}", progress=False)


def test_a_device_that_is_not_there(make_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"train.device = 'cuda', but there is no GPU here"):
        train(make_recipe("train.device=cuda"), tmp_path / "run", progress=False)


def break_at(monkeypatch, step, harm):
    """Let `harm(run)` happen before a step."""
    training_step = loop.training_step

    def broken_step(run, **settings):
        if run.step + 1 == step:
            harm(run)
        return training_step(run, **settings)

    monkeypatch.setattr(loop, "training_step", broken_step)


def nan_weight(run):
    run.model.model.layers[1].block_sparse_moe.experts.w2.data[0, 0, 0] = torch.nan


def nan_output(run):
    gate = run.model.model.layers[0].self_attn.g_proj
    gate.register_forward_hook(lambda module, inputs, output: output * torch.inf)


def nan_gradient(run):
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g * torch.nan

    up = run.model.model.layers[2].block_sparse_moe.routed_expert_up_proj
    up.register_forward_pre_hook(lambda module, inputs: Poison.apply(inputs[0]))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (nan_weight, "the weight model.layers.1.block_sparse_moe.experts.w2"),
        (nan_output, "the output of model.layers.0.self_attn.g_proj"),
        (nan_gradient, "the gradient at the output of model.layers.2.block_sparse_moe.routed_expert_norm"),
    ],
)
def test_a_nan_names_step_and_module_and_spoils_no_checkpoint(make_recipe, tmp_path, monkeypatch, harm, words):
    break_at(monkeypatch, 5, harm)
    with pytest.raises(Failure, match=rf"step 5: {words} is not finite; nothing was saved, .* is step-00000003"):
        train(make_recipe(), tmp_path / "run", progress=False)
    assert [f.name for f in checkpoints(tmp_path / "run")] == ["step-00000003"]
    assert records(tmp_path / "run", "train")[-1]["step"] == 4


def test_a_rate_that_blows_up_is_told(make_recipe, tmp_path):
    with pytest.raises(Failure, match=r"step 2: the .* is not finite; .* checkpoint is none; try a lower optim.lr"):
        train(make_recipe("optim.lr=1e38", "optim.clip=0"), tmp_path / "run", progress=False)
    assert not checkpoints(tmp_path / "run")


def test_a_rate_that_blows_up_just_before_an_evaluation(make_recipe, tmp_path):
    with pytest.raises(Failure, match=r"step 1, on held-out text: the .* of model.layers.* is not finite; nothing was"):
        train(make_recipe("optim.lr=1e30", "train.eval_every=1"), tmp_path / "run", progress=False)
    assert not checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PermissionError(errno.EACCES, "no"), UserError, "the cache .* cannot be written; put it elsewhere by OPENK3_"),
        (OSError(errno.ENOSPC, "no"), Failure, "the disk of .*cache.* is full: free some space, or put the cache"),
        (OSError("437485 requested and 303040 written"), Failure, "the disk of .*cache.* is full"),
    ],
)
def test_a_cache_that_takes_nothing(make_recipe, tmp_path, monkeypatch, error, kind, words):
    monkeypatch.setenv("OPENK3_CACHE", str(tmp_path / "cache"))

    def refuse(self, path):
        raise error

    monkeypatch.setattr(Tokenizer, "save", refuse)
    with pytest.raises(kind, match=words):
        train(make_recipe(), tmp_path / "run", progress=False)
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk_while_metrics_are_written(make_recipe, tmp_path, monkeypatch):
    def harm(run):
        def full(handle, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)

    break_at(monkeypatch, 5, harm)
    with pytest.raises(
        Failure, match=r"the disk of .*run is full: the last checkpoint is step-00000003; free some space"
    ):
        train(make_recipe(), tmp_path / "run", progress=False)


@pytest.mark.row(68)
def test_the_loss_is_cross_entropy_alone(make_recipe, tmp_path):
    run = start(make_recipe("train.dtype=float64"), tmp_path, print, shown=False)
    batch = run.loader.next()
    logits = run.model(batch.tokens_T, batch.cu_seqlens)
    expected = F.cross_entropy(logits, batch.targets_T, reduction="sum")
    loss = nats(run.model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name in ("block_sparse_moe.gate", "block_sparse_moe.shared_experts.up_proj", "self_attn.q_proj"):
        weight = run.model.get_parameter(f"model.layers.1.{name}.weight")
        ours, theirs = (torch.autograd.grad(value, weight, retain_graph=True)[0] for value in (loss, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    run.metrics.close()


@pytest.mark.row(97)
def test_qk_clip_is_on_in_training(make_recipe, tmp_path):
    """With a tiny rate the same batch comes again, and no logit exceeds the threshold it was clipped to."""
    tau = 1e-4
    recipe = make_recipe(f"optim.qk_clip_tau={tau}", "optim.lr=1e-12", "balance.rule=none")
    run = start(recipe, tmp_path, print, shown=False)
    state = run.loader.state_dict()
    line, _ = loop.training_step(run)
    assert line["clipped_heads"] == 2
    run.loader.load_state_dict(state)
    batch = run.loader.next()
    run.model(batch.tokens_T, batch.cu_seqlens)
    torch.testing.assert_close(run.clip.seen[0].largest(torch.arange(2)), torch.full((2,), tau), rtol=1e-4, atol=0)
    run.metrics.close()


@pytest.mark.row(72)
def test_evaluation_probe_and_samples_change_nothing_but_their_lines(make_recipe, tmp_path):
    often, never = make_recipe("train.eval_every=1"), make_recipe("train.eval_every=100")
    for name, recipe in (("often", often), ("never", never)):
        train(recipe, tmp_path / name, progress=False)
    assert records(tmp_path / "often", "train") == records(tmp_path / "never", "train")
    assert len(records(tmp_path / "often", "eval")) == 8
    states = [(latest(tmp_path / name) / "state" / "tensors.safetensors").read_bytes() for name in ("often", "never")]
    assert states[0] == states[1]


@pytest.mark.row(74)
def test_quantile_balancing_in_training_beside_no_balancing(make_recipe, tmp_path):
    """Imbalance over a run that starts from a lopsided bias, q beside it."""
    worst = {}
    for rule in ("quantile", "sign", "none"):
        recipe = make_recipe(
            f"balance.rule={rule}", "train.batch_tokens=512", "train.micro_tokens=512", "train.steps=12"
        )
        (tmp_path / rule).mkdir()
        run = start(recipe, tmp_path / rule, print, shown=False)
        for layer in list(run.model.model.layers)[1:]:
            layer.block_sparse_moe.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 8))
        lines = [loop.training_step(run)[0] for _ in range(12)]
        run.metrics.close()
        assert all(line["q"] == 512 * 2 / 8 for line in lines)
        worst[rule] = [max(line["maxvio"]) for line in lines]
    assert worst["quantile"][0] == worst["none"][0] > 1  # the first batch is routed without a bias
    assert max(worst["quantile"][4:]) < 0.6 * min(worst["none"][4:])
    assert max(worst["quantile"][4:]) < min(worst["sign"][4:])
