"""metrics.jsonl: appended line by line, cut where a run goes on."""

import json
import os

import pytest

from openk3.train.metrics import Metrics, cut_after


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_run(path, steps, curves=None):
    metrics = Metrics(path, -1, curves)
    metrics.write("corpus", 0, 0, hash="x")
    for step in range(1, steps + 1):
        metrics.write("train", step, step * 10, loss=1 / step, maxvio=[0.5, 1.5])
        if step % 2 == 0:
            metrics.write("eval", step, step * 10, loss=2 / step)
            metrics.write("sample", step, step * 10, prompt="a", text="b\n\u2028")
    metrics.sync()
    metrics.close()


@pytest.mark.parametrize("step", range(6))
def test_lines_behind_the_checkpoint_are_cut_and_written_again(tmp_path, step):
    write_run(tmp_path / "whole", 6)
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "resumed").write_bytes(whole)
    Metrics(tmp_path / "resumed", step).close()
    kept = lines(tmp_path / "resumed")
    assert kept == [line for line in lines(tmp_path / "whole") if line["step"] <= step]
    assert whole.startswith((tmp_path / "resumed").read_bytes())


def test_torn_and_foreign_lines_end_the_file(tmp_path):
    path = tmp_path / "metrics"
    write_run(path, 4)
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:-20], whole + b'{"kind": "train", "ste', whole + b"\0\0\0\n", whole + b"[1]\n"):
        path.write_bytes(torn)
        cut_after(path, 4)
        kept = path.read_bytes()
        assert whole.startswith(kept)
        assert kept.endswith(b"\n")
        assert len(kept) >= len(whole[: whole[:-1].rindex(b"\n") + 1])


def test_a_line_has_left_the_process_when_write_returns(tmp_path):
    metrics = Metrics(tmp_path / "metrics", -1)
    metrics.write("train", 1, 10, loss=0.1)
    assert lines(tmp_path / "metrics") == [{"kind": "train", "step": 1, "tokens": 10, "loss": 0.1}]
    metrics.close()


def test_numbers_keep_every_bit_and_nan_is_no_number(tmp_path):
    metrics = Metrics(tmp_path / "metrics", -1)
    metrics.write("train", 1, 10, loss=0.1 + 0.2)
    assert lines(tmp_path / "metrics")[0]["loss"] == 0.1 + 0.2
    with pytest.raises(ValueError, match="not JSON compliant"):
        metrics.write("train", 2, 20, loss=float("nan"))
    metrics.close()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    metrics = Metrics(tmp_path / "metrics", -1)
    metrics.write("train", 1, 10, loss=0.5)
    assert lines(tmp_path / "metrics")[0]["loss"] == 0.5
    metrics.close()


def test_curves_go_to_tensorboard_when_it_is_installed(tmp_path, monkeypatch):
    write_run(tmp_path / "plain", 2)
    write_run(tmp_path / "metrics", 2, tmp_path / "curves")
    assert os.listdir(tmp_path / "curves")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write_run(tmp_path / "without", 2, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert (
        (tmp_path / "plain").read_bytes() == (tmp_path / "without").read_bytes() == (tmp_path / "metrics").read_bytes()
    )
