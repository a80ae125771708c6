"""Run folders and checkpoints under every kind of bad luck: other processes, kills, full disks, damage."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openk3 import disk
from openk3.chat.tokenizer import Tokenizer
from openk3.errors import Failure, UserError
from openk3.model.checkpoint import load_model
from openk3.model.k3 import K3
from openk3.train import state
from openk3.train.folder import open_run
from openk3.train.optim import Optimizer
from openk3.train.recipe import load_recipe
from openk3.train.state import Position, checkpoints, latest, load, read_state, save

RECIPE = load_recipe("pico", ["train.steps=5"])
TOKENIZER = Tokenizer({bytes([i]): i for i in range(256)} | {bytes([97, i]): 256 + i for i in range(256)})
RANDOM_BYTES = "state/tensors.safetensors"


@pytest.fixture(scope="module")
def trained():
    """A model and optimizer whose every tensor is different from its start."""
    model = K3.initialised(RECIPE.model, 3)
    optimizer = Optimizer(model, RECIPE.model, RECIPE.optim)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step(0.01)
    for name, buffer in model.named_buffers():
        assert name.endswith("e_score_correction_bias")
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model, optimizer


def position(step):
    return Position(step, step * 100, 1.5, {"epoch": 0, "offset": step}, "abc")


def put(run, trained, step, keep=2):
    return save(run, *trained, position(step), RECIPE, TOKENIZER, keep)


def fresh():
    model = K3.initialised(RECIPE.model, 4)
    return model, Optimizer(model, RECIPE.model, RECIPE.optim)


def test_a_checkpoint_brings_everything_back_bit_for_bit(tmp_path, trained):
    torch.manual_seed(5)
    torch.rand(3)
    folder = put(tmp_path, trained, 7)
    expected = torch.rand(4)
    model, optimizer = fresh()
    assert load(folder, model, optimizer, RECIPE) == position(7)
    assert torch.equal(torch.rand(4), expected)
    for theirs, ours in (
        (trained[0].state_dict(), model.state_dict()),
        (trained[1].state_dict(), optimizer.state_dict()),
    ):
        assert list(theirs) == list(ours)
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_model_part_is_what_other_programs_read(tmp_path, trained):
    folder = put(tmp_path, trained, 1)
    model = load_model(folder / "model")
    weight = "model.layers.1.self_attn.q_proj.weight"
    ours = dict(trained[0].named_parameters())[weight].detach()
    assert torch.equal(dict(model.named_parameters())[weight], ours.bfloat16().float())
    assert Tokenizer(folder / "model" / "tiktoken.model").n_ranks == 512
    assert set(load_file(folder / RANDOM_BYTES)) >= {f"master.{weight}", f"optim.momentum.{weight}", "rng.cpu"}


def test_old_checkpoints_go_only_after_the_new_one_stands(tmp_path, trained, monkeypatch):
    for step in (1, 2, 3):
        put(tmp_path, trained, step)
    assert [f.name for f in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]

    def no_rename(source, target):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", no_rename)
        with pytest.raises(OSError, match="Input/output error"):
            put(tmp_path, trained, 4)
    assert [f.name for f in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000002", "step-00000003"]
    assert latest(tmp_path).name == "step-00000003"
    put(tmp_path, trained, 5, keep=1)
    assert [f.name for f in checkpoints(tmp_path)] == ["step-00000005"]


def test_a_checkpoint_bears_its_name_only_once_it_is_whole_and_synced(tmp_path, trained, monkeypatch):
    """Whatever the moment of a kill: at every write the folder is not there yet, and syncing comes before renaming."""
    put(tmp_path, trained, 1)
    folder, events = state.checkpoint_folder(tmp_path, 2), []

    def watch(place, name):
        real = getattr(place, name)

        def seen(*args, **settings):
            events.append(name)
            assert folder.exists() == ("rename" in events[:-1])
            return real(*args, **settings)

        monkeypatch.setattr(place, name, seen)

    watch(state, "write_model")
    watch(state, "write_tensors")
    watch(disk, "sync_tree")
    watch(os, "rename")
    watch(disk, "remove_folder")
    put(tmp_path, trained, 2, keep=1)
    assert events == ["write_model", "write_tensors", "sync_tree", "rename", "remove_folder", "rename"]


def test_half_written_siblings_are_swept_and_never_taken_for_a_checkpoint(tmp_path, trained):
    run = tmp_path / "run"
    with open_run(run, RECIPE):
        put(run, trained, 1)
    half = run / "checkpoints" / ".step-00000002.partial"
    (half / "state").mkdir(parents=True)
    (half / "state" / "tensors.safetensors").write_bytes(b"torn")
    (run / ".config.toml.partial").write_text("torn")
    assert latest(run).name == "step-00000001"
    with open_run(run, RECIPE):
        assert sorted(os.listdir(run / "checkpoints")) == ["step-00000001"]
        assert not (run / ".config.toml.partial").exists()


def damage_truncate(folder):
    path = folder / RANDOM_BYTES
    os.truncate(path, path.stat().st_size - 1)
    return r"state/tensors.safetensors has \d+ bytes, \d+ were written"


def damage_missing(folder):
    (folder / "model" / "config.json").unlink()
    return "model/config.json is missing"


def damage_json(folder):
    path = folder / "state" / "state.json"
    path.write_text(path.read_text()[:-9])
    return "state/state.json cannot be read"


def damage_format(folder):
    path = folder / "state" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    return "state/state.json is not of format 1"


def damage_header(folder):
    path = folder / RANDOM_BYTES
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 16 + content[16:])
    return "state/tensors.safetensors: "


@pytest.mark.parametrize("harm", [damage_truncate, damage_missing, damage_json, damage_format, damage_header])
def test_a_damaged_checkpoint_is_told_in_one_sentence(tmp_path, trained, harm):
    folder = put(tmp_path, trained, 1)
    words = harm(folder)
    with pytest.raises(UserError, match=rf"checkpoint .*step-00000001 is damaged \({words}") as error:
        load(folder, *fresh(), RECIPE)
    assert "\n" not in str(error.value)
    assert "remove it" in str(error.value)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path, trained):
    folder = put(tmp_path, trained, 1)
    other = load_recipe("pico", ["train.steps=5", "optim.lr=1e-4"])
    with pytest.raises(UserError, match=r"step-00000001 was trained with optim.lr = 0.005, not 0.0001; choose"):
        load(folder, *fresh(), other)


def test_a_run_reopened_with_another_recipe_is_refused(tmp_path):
    with open_run(tmp_path / "run", RECIPE):
        (tmp_path / "run" / "metrics.jsonl").write_text("")  # training has begun
    before = (tmp_path / "run" / "config.toml").read_text()
    other = load_recipe("pico", ["train.steps=6", "train.seed=1"])
    with (
        pytest.raises(UserError, match=r"run was trained with train.steps = 5, not 6"),
        open_run(tmp_path / "run", other),
    ):
        pass
    assert (tmp_path / "run" / "config.toml").read_text() == before
    with open_run(tmp_path / "run", RECIPE):
        pass


def test_a_run_that_never_began_takes_another_recipe(tmp_path):
    other = load_recipe("pico", ["train.steps=6"])
    for recipe in (RECIPE, other):  # the first had a data source that is not there, say
        with open_run(tmp_path / "run", recipe):
            pass
    assert (tmp_path / "run" / "config.toml").read_text() == other.to_toml()
    (tmp_path / "run" / "checkpoints").mkdir()  # metrics.jsonl was lost, the training was not
    with pytest.raises(UserError, match=r"run was trained with train.steps = 6"), open_run(tmp_path / "run", RECIPE):
        pass


def test_all_files_of_a_checkpoint_have_one_mode(tmp_path, trained):
    put(tmp_path, trained, 1)
    assert len({f.stat().st_mode for f in latest(tmp_path).rglob("*") if f.is_file()}) == 1


def test_a_file_of_another_user_is_not_called_damaged(tmp_path, trained, monkeypatch):
    put(tmp_path, trained, 1)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "tensors.safetensors")
    with pytest.raises(UserError, match=r"step-00000001: state/tensors.safetensors may not be read by this user"):
        load(latest(tmp_path), *fresh(), RECIPE)


def test_weights_that_are_not_finite_are_not_saved(tmp_path, trained):
    put(tmp_path, trained, 1)
    model, optimizer = fresh()
    model.model.layers[2].self_attn.dt_bias.data[3] = torch.inf
    with pytest.raises(Failure, match=r"model.layers.2.self_attn.dt_bias is not finite after step 2: no checkpoint"):
        put(tmp_path, (model, optimizer), 2)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


@pytest.mark.parametrize("writer", ["write_tensors", "write_model", "sync_folder"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(tmp_path, trained, monkeypatch, writer, code):
    put(tmp_path, trained, 1)

    def full(*args, **settings):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk if writer == "sync_folder" else state, writer, full)
    with pytest.raises(Failure, match=r"the disk of .* is full: step-00000002 was not written, step-00000001 is whole"):
        put(tmp_path, trained, 2)
    monkeypatch.undo()
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    load(latest(tmp_path), *fresh(), RECIPE)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB, where the machine lets a test mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system, to fill it for real")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk, trained):
    (small_disk / "ballast").write_bytes(b"0" * 1024)
    size = sum(f.stat().st_size for f in put(small_disk, trained, 1).rglob("*") if f.is_file())
    for free in range(size // 20, size, size // 5):  # the write stops in another file each time
        left = os.statvfs(small_disk)
        (small_disk / "ballast").write_bytes(b"0" * (left.f_bavail * left.f_frsize + 1024 - free))
        with pytest.raises(Failure, match=r"is full: step-00000002 was not written, step-00000001 is whole"):
            put(small_disk, trained, 2)
        assert os.listdir(small_disk / "checkpoints") == ["step-00000001"]
        (small_disk / "ballast").write_bytes(b"")
    read_state(latest(small_disk))
    load(latest(small_disk), *fresh(), RECIPE)


HOLDER = """
import sys
from pathlib import Path
from openk3.train.folder import open_run
from openk3.train.recipe import load_recipe
with open_run(Path(sys.argv[1]), load_recipe("pico", ["train.steps=5"])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_on_one_run_folder(tmp_path):
    root = str(Path(__file__).parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"run is in use by process {holder.pid}; wait for it, or choose another"),
            open_run(tmp_path / "run", RECIPE),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with open_run(tmp_path / "run", RECIPE):  # a killed holder leaves no lock
        assert re.fullmatch(str(os.getpid()), (tmp_path / "run" / ".lock").read_text())


def test_a_run_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="is not a folder; choose another name for the run"), open_run(path, RECIPE):
            pass
