"""Runs of an experiment: done once, resumed, shared; what fails is told in a sentence."""

import json
import os
import sys

import pytest

from openk3.errors import Failure
from openk3.evals.experiments import pool
from openk3.evals.experiments.pool import Job, Outcome, run_all
from openk3.train import folder as names

TINY = (
    "data.context=32 model.num_hidden_layers=2 train.steps=4 train.batch_tokens=64 train.eval_every=9 "
    'train.eval_tokens=64 train.save_every=2 train.sample_prompts=[] data.source="{}/*.txt"'
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"{i}.txt").write_text(" ".join(f"word{j * i % 71} of {j}" for j in range(300)))
    return folder


@pytest.fixture
def stub(monkeypatch):
    """Replaces the process of a run by a small program; {folder} and {label} stand for its own."""

    def put(program):
        def command(job, folder):
            return [sys.executable, "-c", program.replace("{folder}", str(folder)).replace("{label}", job.label)]

        monkeypatch.setattr(Job, "command", command)
        monkeypatch.setattr(pool, "prepare_text", lambda jobs: None)

    return put


def test_two_runs_end_to_end_and_nothing_twice(texts, tmp_path, monkeypatch):
    sets = tuple(TINY.format(texts).split())
    jobs = [Job("a", "pico", sets, keep=True), Job("b", "pico", (*sets, "model.residual=plain"), watch="activations")]
    done = run_all(jobs, 2, tmp_path)
    assert [done[name].records["eval"][-1]["step"] for name in "ab"] == [4, 4]
    assert done["a"].bpb > 0 and "act_experts" in done["b"].train[0] and "act_experts" not in done["a"].train[0]
    assert list((done["a"].folder / names.CHECKPOINTS).glob("step-*"))
    assert not (done["b"].folder / names.CHECKPOINTS).exists()
    made = pool.provenance(list(done.values()))
    assert len(made["corpus"]) == 64 and made["machine"]["jobs"] == 2

    monkeypatch.setattr(pool.subprocess, "Popen", None)  # the second time no process is started
    again = run_all([Job("other name", "pico", sets), jobs[1]], 1, tmp_path)
    assert again["other name"].records == done["a"].records


def test_a_run_is_known_by_its_recipe_and_observer(tmp_path):
    same = [
        Job("x", "nano"),
        Job("y", "nano", ("optim.lr=4e-3",)),
        Job("z", "nano", ("optim.lr=0.004", "train.seed=0")),
    ]
    other = [Job("x", "nano", ("train.seed=1",)), Job("x", "nano", watch="depth"), Job("x", "pico")]
    assert len({job.folder(tmp_path) for job in same}) == 1
    assert len({job.folder(tmp_path) for job in [same[0], *other]}) == 4


def test_a_failed_run_names_its_log_and_stops_the_others(stub, tmp_path):
    stub("import sys, time; time.sleep(60) if '{label}' == 'second' else sys.exit('openk3: no room')")
    jobs = [Job("first", "pico"), Job("second", "pico", ("train.seed=1",))]
    with pytest.raises(Failure, match=r"run 'first' failed \(exit code 1\); .*log.txt says why"):
        run_all(jobs, 2, tmp_path)
    assert not any((job.folder(tmp_path) / pool.ENDED).exists() for job in jobs)


def test_divergence_is_an_outcome(stub, tmp_path):
    line = json.dumps({"kind": "train", "step": 3, "tokens": 9, "loss": 9.0})
    stub("import sys, pathlib; f = pathlib.Path('{folder}'); (f / 'metrics.jsonl').write_text('''" + line + "\\n'''); "
         "sys.exit('openk3: step 4: the loss is not finite; nothing was saved')")  # fmt: skip
    found = run_all([Job("hot", "pico")], 1, tmp_path)["hot"]
    assert found.diverged.startswith("step 4: the loss is not finite") and found.bpb is None
    assert found.train[-1]["step"] == 3
    assert run_all([Job("hot", "pico", keep=True)], 1, tmp_path)["hot"].diverged


def test_a_run_that_was_asked_to_stop_is_not_ended(stub, tmp_path):
    line = json.dumps({"kind": "eval", "step": 3, "tokens": 9, "loss": 9.0})
    stub("import pathlib; (pathlib.Path('{folder}') / 'metrics.jsonl').write_text('''" + line + "\\n''')")
    with pytest.raises(KeyboardInterrupt):
        run_all([Job("x", "pico")], 1, tmp_path)
    assert not (Job("x", "pico").folder(tmp_path) / pool.ENDED).exists()


def test_labels_are_unique(tmp_path):
    with pytest.raises(ValueError, match="same label"):
        run_all([Job("x", "pico"), Job("x", "nano")], 1, tmp_path)


def test_runs_that_cannot_be_compared_are_refused():
    how = {"date": "2026-01-01", "versions": {"torch": "1"}, "cpu": "c", "cores": 1, "jobs": 1, "seconds": 1.0}

    def outcome(corpus, versions):
        return Outcome(Job("x", "pico"), None, {"corpus": [{"hash": corpus}]}, "", how | {"versions": versions})

    assert pool.provenance([outcome("a", {"torch": "1"})] * 2)["corpus"] == "a"
    with pytest.raises(Failure, match="different text"):
        pool.provenance([outcome("a", {}), outcome("b", {})])
    with pytest.raises(Failure, match="different versions"):
        pool.provenance([outcome("a", {"torch": "1"}), outcome("a", {"torch": "2"})])


def test_a_process_has_one_thread(stub, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "7")
    stub("import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']) + 40)")
    with pytest.raises(Failure, match="exit code 41"):
        run_all([Job("x", "pico")], 1, tmp_path)
