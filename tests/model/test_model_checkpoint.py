"""`model/`: the released names, dtypes and files; bit-exact round trip; damage is named, not loaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openk3.config import named
from openk3.model.checkpoint import INDEX, load_model, save_model
from openk3.model.k3 import K3
from openk3.model.released import text_entries
from openk3.model.variants import k2like

CU = torch.tensor([0, 9], dtype=torch.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(K3.initialised(named("pico"), 0), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("config", [named("pico"), k2like(named("pico")), named("pico").replace(kda_gate="low_rank")])
def test_round_trip(tmp_path: Path, config) -> None:
    model = K3.initialised(config, 3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(tensor.to(torch.bfloat16) if not name.endswith("correction_bias") else tensor + 0.123)
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config == config
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    x = torch.arange(9)
    assert torch.equal(model(x, CU), again(x, CU))


def test_files_are_the_released_layout(folder: Path) -> None:
    files = sorted(f.name for f in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-000006.safetensors" for i in range(1, 7)]
    index = json.loads((folder / INDEX).read_text())
    expected = {e.name: e for e in text_entries(named("pico"))}
    assert set(index["weight_map"]) == set(expected)
    nbytes = 0
    for file in files:
        for name, tensor in load_file(folder / file).items():
            assert index["weight_map"][name] == file
            assert tuple(tensor.shape) == expected[name].shape
            assert str(tensor.dtype) == {"F32": "torch.float32", "BF16": "torch.bfloat16"}[expected[name].dtype]
            nbytes += tensor.nbytes
            layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "5"
            assert file == files[int(layer)]
    assert index["metadata"]["total_size"] == nbytes
    a_log = load_file(folder / files[0])["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (128,) and (a_log[2:] == 0).all()
    assert not any("weight_packed" in name for name in expected)


def test_loading_in_bf16_keeps_the_float32_list(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16)
    assert model.compute_dtype == torch.bfloat16
    for name, p in model.named_parameters():
        wide = name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight"))
        assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
    assert all(b.dtype == torch.float32 for b in model.buffers())
    assert torch.isfinite(model(torch.arange(9), CU)).all()


def rewrite(folder: Path, change) -> None:
    file = folder / "model-00001-of-000006.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


NORM = "language_model.model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "it has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / INDEX).unlink(), "it has no model.safetensors.index.json"),
        (lambda f: (f / INDEX).write_text("[]"), "model.safetensors.index.json has no weight_map of file names"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 3}}'), "has no weight_map of file names"),
        (
            lambda f: (f / "model-00002-of-000006.safetensors").unlink(),
            "names model-00002-of-000006.safetensors, which",
        ),
        (lambda f: (f / "model-00002-of-000006.safetensors").write_bytes(b"x" * 50), "is damaged"),
        (lambda f: rewrite(f, lambda t: t.pop(NORM)), f"missing {NORM}"),
        (lambda f: rewrite(f, lambda t: t.update({NORM: torch.zeros(63).bfloat16()})), r"\[63\], not BF16 \[64\]"),
        (lambda f: rewrite(f, lambda t: t.update({NORM: torch.zeros(64)})), "torch.float32"),
    ],
)
def test_damage_is_named(folder: Path, damage, words: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=words):
        load_model(folder)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_shard_cut_anywhere_is_named(folder: Path, cut: int) -> None:
    file = folder / "model-00004-of-000006.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match="model-00004-of-000006.safetensors is damaged"):
        load_model(folder)


def test_all_faults_are_reported_at_once(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["language_model.extra"] = index["weight_map"].pop(NORM)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"missing {NORM}; unexpected language_model.extra"):
        load_model(folder)


def test_all_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_model(K3.initialised(named("pico"), 0), tmp_path / "model")
    finally:
        os.umask(before)
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "model").iterdir()} == {0o640}
