"""`model/`: the released names, dtypes and files; bit-exact round trips; damage is named, not loaded."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openk3 import disk
from openk3.config import named
from openk3.errors import Failure
from openk3.model import checkpoint
from openk3.model.checkpoint import INDEX, load_model, save_model
from openk3.model.files import open_model
from openk3.model.k3 import K3
from openk3.model.released import entries, text_entries, vision_entries
from openk3.model.variants import k2like
from openk3.ops.mx import fake_quantize

CU = torch.tensor([0, 9], dtype=torch.int32)
PICO = named("pico")
NORM = "language_model.model.layers.0.input_layernorm.weight"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts."


@pytest.fixture(scope="module")
def model() -> K3:
    """Every tensor different from its start, and exactly representable on disk."""
    model = K3.initialised(PICO, 3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
            if not name.endswith("correction_bias"):
                tensor.copy_(tensor.to(torch.bfloat16))
    return model


@pytest.fixture(params=[False, True], ids=["bf16", "packed"])
def either(request: pytest.FixtureRequest, model: K3, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model", packed=request.param)
    return tmp_path / "model"


@pytest.fixture
def folder(model: K3, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def packed(model: K3, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model", packed=True)
    return tmp_path / "model"


@pytest.mark.parametrize("config", [PICO, k2like(PICO), PICO.replace(kda_gate="low_rank")])
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


def test_packed_experts_load_as_the_values_that_training_sees(model: K3, packed: Path) -> None:
    again = load_model(packed).state_dict()
    for name, tensor in model.state_dict().items():
        expected = fake_quantize(tensor, "mxfp4") if ".experts.w" in name else tensor
        assert torch.equal(again[name], expected), name


def test_files_are_the_released_layout(either: Path) -> None:
    files = sorted(f.name for f in either.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-000006.safetensors" for i in range(1, 7)]
    index, hf = (json.loads((either / name).read_text()) for name in (INDEX, "config.json"))
    packed = "quantization_config" in hf["text_config"]
    expected = {e.name: e for e in text_entries(PICO, packed=packed)}
    assert set(index["weight_map"]) == set(expected)
    assert sum("weight_packed" in name for name in expected) == (4 * 8 * 3 if packed else 0)
    nbytes = 0
    for file in files:
        for name, tensor in load_file(either / file).items():
            assert index["weight_map"][name] == file
            assert tuple(tensor.shape) == expected[name].shape
            assert {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}[
                expected[name].dtype
            ] == tensor.dtype
            nbytes += tensor.nbytes
            layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "5"
            assert file == files[int(layer)]
    assert index["metadata"]["total_size"] == nbytes
    a_log = load_file(either / files[0])["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (128,) and (a_log[2:] == 0).all() and (a_log[:2] != 0).all()


def test_loading_in_bf16_keeps_the_float32_list(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16)
    assert model.compute_dtype == torch.bfloat16
    for name, p in model.named_parameters():
        wide = name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight"))
        assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
    assert all(b.dtype == torch.float32 for b in model.buffers())
    assert torch.isfinite(model(torch.arange(9), CU)).all()
    with pytest.raises(ValueError, match="parts = 'all' cannot be loaded"):
        load_model(folder, parts="all")


PEAK = """
import sys
from pathlib import Path
from openk3.config import named
from openk3.model import checkpoint
from openk3.model.k3 import K3
way, folder = sys.argv[1], Path(sys.argv[2])
def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
config = named("pico").replace(num_experts=128, moe_intermediate_size=256, routed_expert_hidden_size=256)
small = folder.with_name("small")
if way == "save":
    checkpoint.save_model(K3.initialised(named("pico"), 0), small)
    model = K3.initialised(config, 0)
    before = memory("VmRSS")
    checkpoint.save_model(model, folder)
else:
    checkpoint.load_model(small)  # after this PyTorch has imported all that it wants (50 MB)
    before = memory("VmRSS")
    model = checkpoint.load_model(folder, dtype=checkpoint.torch.bfloat16)
size = sum(t.nbytes for t in model.state_dict().values()) / 2**20
print(size, memory("VmHWM") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads its peak memory from /proc, which only Linux has"
)
def test_neither_way_holds_a_second_copy(tmp_path: Path) -> None:
    """Experts of 400 MB in float32: saving adds a sliver to the model, loading the model itself and a sliver."""
    run = [sys.executable, "-c", PEAK]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    size, grown = {}, {}
    for way in ("save", "load"):
        done = subprocess.run([*run, way, str(tmp_path / "m")], capture_output=True, text=True, env=env, check=True)
        size[way], grown[way] = map(float, done.stdout.split())
    assert size["save"] > 380 and size["load"] > 190
    assert grown["save"] < 30
    assert size["load"] * 0.9 < grown["load"] < size["load"] + 30


def rewrite(folder: Path, change, shard: int = 1) -> None:
    file = folder / f"model-{shard:05d}-of-000006.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def reindex(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "it has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / INDEX).unlink(), "it has no model.safetensors.index.json"),
        (lambda f: (f / INDEX).write_text("[]"), "model.safetensors.index.json has no weight_map of file names"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 3}}'), "has no weight_map of file names"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../b"}}'), r"names '../b', which is no file of this"),
        (
            lambda f: (f / "model-00002-of-000006.safetensors").unlink(),
            "names files that are not there: model-00002-of-000006.safetensors$",
        ),
        (lambda f: (f / "model-00002-of-000006.safetensors").write_bytes(b"x" * 50), "00002-of-000006.* is damaged"),
        (lambda f: rewrite(f, lambda t: t.pop(NORM)), rf"1 missing \({NORM}\); 1 in the index alone \({NORM}\)$"),
        (
            lambda f: rewrite(f, lambda t: t.update({NORM: torch.zeros(63).bfloat16()})),
            rf"1 of another shape \({NORM} is \[63\], not \[64\]\)$",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({NORM: torch.zeros(64)})),
            rf"1 of another dtype \({NORM} is F32, not BF16\)$",
        ),
        (
            lambda f: reindex(f, lambda i: i["weight_map"].update({NORM: "model-00002-of-000006.safetensors"})),
            rf"1 not where the index says \({NORM} in model-00001-of-000006.safetensors\)$",
        ),
        (
            lambda f: reindex(f, lambda i: i["metadata"].update(total_size=7)),
            r"total_size of 7, the tensors have \d+",
        ),
        (lambda f: rewrite(f, lambda t: t[NORM].fill_(torch.nan)), f"{NORM} in .* that is not finite"),
        (
            lambda f: rewrite(f, lambda t: t[NORM][3:4].fill_(-torch.inf)),
            f"{NORM} in .* that is not finite",
        ),
    ],
)
def test_damage_is_named(folder: Path, damage, words: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=words) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


def test_all_faults_are_told_at_once_and_thousands_do_not_flood(folder: Path) -> None:
    """Half a layer is missing, one tensor is new, one has another shape, another one another dtype."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]
        tensors["language_model.extra"] = torch.zeros(2)
        tensors["language_model.model.layers.1.input_layernorm.weight"] = torch.zeros(63).bfloat16()
        tensors["language_model.model.layers.1.self_attn.dt_bias"] = torch.zeros(64).bfloat16()

    rewrite(folder, change, 2)
    with pytest.raises(ValueError, match="does not hold the model its config describes") as error:
        load_model(folder)
    told = str(error.value)
    assert f"24 missing ({EXPERT}0.w1.weight, {EXPERT}1.w1.weight, {EXPERT}2.w1.weight and 21 more)" in told
    assert "1 unexpected (language_model.extra)" in told
    assert "1 of another shape" in told and "1 of another dtype" in told
    assert len(told) < 2000 and "\n" not in told


def test_a_bad_folder_is_refused_before_any_tensor_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(folder, lambda t: t.pop("language_model.lm_head.weight"), 6)
    monkeypatch.setattr(checkpoint, "read", lambda *_, **__: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match="1 missing"):
        load_model(folder)


def test_nan_scales_and_infinite_values_of_packed_experts_are_named(packed: Path) -> None:
    name = f"{EXPERT}5.w2.weight_scale"
    rewrite(packed, lambda t: t[name][3:4, 0:1].fill_(255), 2)
    with pytest.raises(ValueError, match=rf"{name} has a scale that is NaN \(byte 255\)"):
        load_model(packed)
    rewrite(packed, lambda t: (t[name][3:4, 0:1].fill_(254), t[name.replace("scale", "packed")][3].fill_(0x77)), 2)
    with pytest.raises(ValueError, match=rf"{EXPERT}5.w2.weight_packed cannot be unpacked"):
        load_model(packed)


def test_a_vision_tower_beside_the_text_is_checked_and_left_alone(
    model: K3, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tower's table made small, since the real one has 450 million parameters."""
    small = [e._replace(shape=tuple(min(n, 3) for n in e.shape)) for e in vision_entries(PICO.hidden_size)]
    monkeypatch.setattr("openk3.model.released.vision_entries", lambda hidden_size: small)
    listed = entries(PICO, vision=True)
    own = load_file_all(folder)
    other = folder.parent / "whole"
    tower = {e.name: torch.full(e.shape, 0.5).bfloat16() for e in small}
    checkpoint.write_layout(other, PICO.to_hf(vision=True), listed, lambda e: (own | tower)[e.name])
    names = sorted(f.name for f in other.glob("*.safetensors"))
    assert names[-1] == "model-00008-of-000008.safetensors" and len(names) == 8
    assert all(n.startswith("vision_tower.") for n in load_file(other / names[-1]))
    assert all(n.startswith("mm_projector.") for n in load_file(other / names[-2]))
    assert open_model(other).vision
    again = load_model(other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    tensors = load_file(other / names[-2])
    tensors.pop("mm_projector.post_norm.weight")
    save_file(tensors, other / names[-2])
    with pytest.raises(ValueError, match=r"1 missing \(mm_projector.post_norm.weight\)"):
        load_model(other)


def load_file_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def test_saving_is_all_or_nothing(model: K3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up at the first, a middle or the last file, or only when it is asked to keep them."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real, calls = checkpoint.write, []
    for after in (0, 3):
        calls.clear()

        def write(*args, after: int = after, **settings):
            calls.append(1)
            return full() if len(calls) > after else real(*args, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write", write)
            with pytest.raises(Failure, match=r"is full: .*new was not written; free some space and try again"):
                save_model(model, tmp_path / "new")
        assert os.listdir(tmp_path) == []
    for place, name in ((disk, "sync_tree"), (Path, "write_text"), (os, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(Failure, match="is full"):
                save_model(model, tmp_path / "new")
        assert os.listdir(tmp_path) == []
    save_model(model, tmp_path / "new")
    before = {f.name: f.read_bytes() for f in (tmp_path / "new").iterdir()}
    with pytest.raises(ValueError, match="new is there already; choose another name"):
        save_model(K3.initialised(PICO, 9), tmp_path / "new")
    assert {f.name: f.read_bytes() for f in (tmp_path / "new").iterdir()} == before
    odd = K3.initialised(PICO.replace(activation="swiglu", moe_intermediate_size=40), 0)
    with pytest.raises(ValueError, match="moe_intermediate_size = 40 is not a multiple of 32"):
        save_model(odd, tmp_path / "odd", packed=True)
    assert os.listdir(tmp_path) == ["new"]


def test_all_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_model(K3.initialised(PICO, 0), tmp_path / "model")
    finally:
        os.umask(before)
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "model").iterdir()} == {0o640}
