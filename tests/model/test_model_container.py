"""The safetensors container: what we write its own reader reads, and no damage goes unnoticed."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from openk3.config import named
from openk3.model.checkpoint import save_model
from openk3.model.container import Entry, read, read_header, write, write_tensors
from openk3.model.k3 import K3

TENSORS = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "halves": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "one": torch.tensor(41),
    "floats": torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).transpose(0, 2),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "a.safetensors", TENSORS)
    return tmp_path / "a.safetensors"


def test_safetensors_reads_what_we_write(file: Path) -> None:
    theirs = load_file(file)
    assert set(theirs) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name], tensor), name
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    save_file({name: t.contiguous() for name, t in TENSORS.items()}, tmp_path / "b", metadata={"format": "pt"})
    for name, span in read_header(tmp_path / "b").items():
        assert torch.equal(read(span), TENSORS[name]), name


def test_reading_goes_into_the_target_whatever_it_is(file: Path) -> None:
    spans = read_header(file)
    floats = TENSORS["floats"]
    same, wide, strided = torch.zeros(4, 3, 2), torch.zeros(4, 3, 2).double(), torch.zeros(4, 2, 3).transpose(1, 2)
    assert read(spans["floats"], out=same).data_ptr() == same.data_ptr()  # no buffer between
    read(spans["floats"], out=wide)
    read(spans["floats"], out=strided)
    assert torch.equal(same, floats) and torch.equal(wide, floats.double()) and torch.equal(strided, floats)
    assert torch.equal(read(spans["floats"], part=2), floats[2])
    target = torch.zeros(4, 3, 2)
    read(spans["floats"], part=1, out=target[3])
    assert torch.equal(target[3], floats[1]) and (target[:3] == 0).all()


def test_one_tensor_at_a_time_is_asked_for(tmp_path: Path) -> None:
    alive, asked = [], []

    def fetch(entry: Entry) -> torch.Tensor:
        assert not any(ref() is not None for ref in alive)
        tensor = torch.zeros(entry.shape)
        alive.append(weakref.ref(tensor))
        asked.append(entry.name)
        return tensor

    assert write(tmp_path / "c", [Entry(n, "F32", (5,)) for n in "abc"], fetch) == 60
    assert asked == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"a was to be F32 \[5\], not torch.float32 \[4\]"):
        write(tmp_path / "d", [Entry("a", "F32", (5,))], lambda entry: torch.zeros(4))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("pico") / "model"
    save_model(K3.initialised(named("pico"), 0), folder, packed=True)
    return (folder / "model-00002-of-000006.safetensors").read_bytes()


@given(where=st.floats(0, 1, exclude_max=True), header=st.booleans())
def test_a_shard_cut_at_any_byte_is_refused(shard: bytes, tmp_path_factory, where: float, header: bool) -> None:
    """Cut in the header, whose length is less than a tenth of the file, as often as anywhere."""
    end = 8 + int.from_bytes(shard[:8], "little")
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    path.write_bytes(shard[: int(where * (end + 1 if header else len(shard)))])
    with pytest.raises(ValueError, match="cut.safetensors is damaged: ") as error:
        read_header(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, -1])
def test_the_edges_of_a_shard(shard: bytes, tmp_path: Path, cut: int) -> None:
    (tmp_path / "cut").write_bytes(shard[:cut])
    with pytest.raises(ValueError, match="is damaged"):
        read_header(tmp_path / "cut")
    (tmp_path / "longer").write_bytes(shard + b"\0")
    with pytest.raises(ValueError, match=r"it has \d+ bytes, more than the \d+ that its header describes"):
        read_header(tmp_path / "longer")


def put(path: Path, header: object, data: bytes = bytes(16)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def described(start: int, stop: int, shape: list | None = None, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{nonsense", "its header is no JSON object"),
        (b"[" * 100_000, "its header is no JSON object"),
        (b"\xff\xfe", "its header is no JSON object"),
        ([1, 2], "its header is no JSON object"),
        ({"a": described(0, 8), "b": described(4, 16)}, "a and b overlap at byte"),
        ({"a": described(0, 8), "b": described(9, 16)}, "a and b leave a gap at byte"),
        ({"a": described(1, 16)}, "the header and a leave a gap"),
        ({"a": described(0, 17)}, r"it has \d+ bytes, fewer than the \d+ that"),
        ({"a": described(0, 15)}, r"it has \d+ bytes, more than the \d+ that"),
        ({"a": described(0, 16, [3])}, "does not describe 'a' as a tensor"),
        ({"a": described(0, 16, [-4, -4])}, "does not describe 'a'"),
        ({"a": described(0, 16, dtype="F7")}, "does not describe 'a'"),
        ({"a": {"dtype": "U8"}}, "does not describe 'a'"),
        ({"a": [0, 16]}, "does not describe 'a'"),
        ({"a": described(0, 16, [True] * 4, "F32")}, "does not describe 'a'"),
    ],
)
def test_a_header_that_lies_is_told(tmp_path: Path, header: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"lie is damaged: .*{words}"):
        read_header(put(tmp_path / "lie", header))


def test_a_file_that_loses_its_end_while_it_is_read(file: Path) -> None:
    spans = read_header(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends before its tensors do"):
        read(max(spans.values(), key=lambda s: s.start + s.nbytes))
