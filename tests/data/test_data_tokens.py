import json
import os
import shutil

import numpy as np
import pytest

from openk3.chat.tokenizer import Tokenizer
from openk3.data import tokens
from openk3.data.bpe import train_bpe
from openk3.data.progress import progress_bar
from openk3.data.sources import Document, corpus_hash, split, stdlib_corpus
from openk3.data.tokens import TokenArray, encode_corpus, prepare

CORPUS = [document for document in stdlib_corpus() if document.path.startswith(("json/", "email/mime/"))]
RANKS = 400


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return cache, prepare(CORPUS, RANKS, cache)


@pytest.fixture
def cache(built, tmp_path):
    """A copy of a cache that holds the corpus, to be damaged."""
    shutil.copytree(built[0], tmp_path / "cache")
    return tmp_path / "cache"


def documents(tokenizer, array):
    pieces = [array.tokens[a:b].tolist() for a, b in zip(array.offsets[:-1], array.offsets[1:], strict=True)]
    assert all(piece[0] == tokenizer.bos and piece[-1] == tokenizer.eos for piece in pieces)
    return [tokenizer.decode(piece[1:-1]) for piece in pieces]


def same(left, right):
    assert left.tokenizer.ranks == right.tokenizer.ranks
    for name in ("train", "held_out"):
        for a, b in zip(getattr(left, name), getattr(right, name), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b)
    counts = ("corpus_hash", "files", "bytes", "held_out_files", "held_out_bytes")
    assert [getattr(left, name) for name in counts] == [getattr(right, name) for name in counts]


def test_documents_come_back(built):
    _, found = built
    train, held_out = split(CORPUS)
    assert documents(found.tokenizer, found.train) == [document.text for document in train]
    assert documents(found.tokenizer, found.held_out) == [document.text for document in held_out]
    # The vocabulary never sees the held-out side.
    assert found.tokenizer.ranks == train_bpe([document.text for document in train], RANKS)


def test_counts(built):
    _, found = built
    assert found.corpus_hash == corpus_hash(CORPUS) and found.files == len(CORPUS)
    assert found.bytes == sum(len(document.text.encode()) for document in CORPUS)
    held_out = split(CORPUS)[1]
    assert found.held_out_files == len(held_out)
    assert found.held_out_bytes == sum(len(document.text.encode()) for document in held_out)
    lengths = np.array(found.tokenizer.token_bytes)
    assert lengths[found.train.tokens].sum() + lengths[found.held_out.tokens].sum() == found.bytes


def test_ids_are_as_wide_as_needed(built):
    _, found = built
    assert found.train.tokens.dtype == found.held_out.tokens.dtype == np.uint16
    assert isinstance(found.train.tokens, np.memmap)
    assert tokens.token_dtype(2**16) == np.uint16 and tokens.token_dtype(2**16 + 1) == np.uint32
    wide = {bytes([byte]): byte for byte in range(256)}
    wide |= {b"\xff" + number.to_bytes(2, "big"): 256 + number for number in range(65_300)}
    array = encode_corpus([Document("a", "hi")], Tokenizer(wide))
    assert array.tokens.dtype == np.uint32 and array.tokens.tolist() == [65_556, ord("h"), ord("i"), 65_557]


def test_chunks_do_not_matter(built, monkeypatch):
    _, found = built
    monkeypatch.setattr(tokens, "ENCODE_CHUNK", 3)
    seen = []
    again = encode_corpus(split(CORPUS)[0], found.tokenizer, lambda *call: seen.append(call), "a stage")
    assert np.array_equal(again.tokens, found.train.tokens)
    assert np.array_equal(again.offsets, found.train.offsets)
    total = len(found.train.offsets) - 1
    assert [done for _, done, _ in seen] == [*range(3, total, 3), total]
    assert {(stage, last) for stage, _, last in seen} == {("a stage", total)}
    empty = encode_corpus([], found.tokenizer)
    assert empty.tokens.shape == (0,) and empty.offsets.tolist() == [0]


def refuse(*_args):
    raise AssertionError("the cache was not used")


def test_cache_is_used(built, monkeypatch):
    cache, found = built
    monkeypatch.setattr(tokens, "build_cache", refuse)
    same(prepare(CORPUS, RANKS, cache), found)
    with pytest.raises(AssertionError, match="not used"):
        prepare(CORPUS, RANKS + 1, cache)
    with pytest.raises(AssertionError, match="not used"):
        prepare(CORPUS[1:], RANKS, cache)
    with pytest.raises(AssertionError, match="not used"):
        prepare(CORPUS, RANKS, cache, tokenizer=Tokenizer(found.tokenizer.ranks))


def test_key_follows_the_pattern(built, monkeypatch):
    _, found = built
    before = tokens.cache_key(found.corpus_hash, RANKS)
    monkeypatch.setattr(tokens, "PATTERN", "other")
    assert tokens.cache_key(found.corpus_hash, RANKS) != before


NAMES = ["held_out_offsets.npy", "held_out_tokens.npy", "meta.json", "tokenizer.model", "train_offsets.npy",
         "train_tokens.npy"]  # fmt: skip


def test_cache_holds_these_files(cache):
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["cut", "emptied", "gone", "flipped"])
def test_damaged_cache_is_built_anew(built, cache, name, damage):
    (folder,) = cache.iterdir()
    path = folder / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 0x80]) + data[middle + 1 :])
    else:
        path.write_bytes(b"" if damage == "emptied" else data[:-20])
    assert tokens.read_cache(folder) is None
    same(prepare(CORPUS, RANKS, cache), built[1])
    assert list(cache.iterdir()) == [folder] and tokens.read_cache(folder) is not None


def test_kill_leaves_no_half_cache(built, tmp_path, monkeypatch):
    real_save = np.save
    calls = []

    def killed(path, array):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real_save(path, array)

    monkeypatch.setattr(np, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(CORPUS, RANKS, tmp_path)
    monkeypatch.setattr(np, "save", real_save)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".part")
    same(prepare(CORPUS, RANKS, tmp_path), built[1])
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in built[0].iterdir()]


def test_leftovers_go_when_they_are_old(cache):
    (folder,) = cache.iterdir()
    old, young = cache / f".{folder.name}.1.part", cache / f".{folder.name}.2.part"
    for part in (old, young):
        part.mkdir()
    os.utime(old, (0, 0))
    (folder / "meta.json").unlink()
    prepare(CORPUS, RANKS, cache)
    assert sorted(cache.iterdir()) == [young, folder]


def test_another_process_may_finish_first(built, cache, monkeypatch, tmp_path):
    """The folder of the first stays, the second's work is dropped."""
    (folder,) = cache.iterdir()
    stamp = (folder / "meta.json").stat().st_mtime_ns
    tokens.build_cache(folder, CORPUS, built[1].corpus_hash, RANKS, None, None)
    assert list(cache.iterdir()) == [folder] and (folder / "meta.json").stat().st_mtime_ns == stamp


def test_a_finished_tokenizer(built, tmp_path):
    own = Tokenizer({bytes([byte]): byte for byte in range(256)} | {b"th": 256})
    found = prepare(CORPUS, 257, tmp_path, tokenizer=own)
    assert found.tokenizer.ranks == own.ranks
    assert np.array_equal(found.train.tokens, encode_corpus(split(CORPUS)[0], own).tokens)
    with pytest.raises(ValueError, match="n_ranks is 300, but the tokenizer given has 257"):
        prepare(CORPUS, 300, tmp_path, tokenizer=own)


def test_too_small_a_corpus(tmp_path):
    with pytest.raises(ValueError, match="merges"):
        prepare([Document("a", "abc"), Document("b", "abc")], RANKS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_single_document(tmp_path):
    text = CORPUS[0].text
    found = prepare([Document("a", text)], 300, tmp_path)
    assert "".join(documents(found.tokenizer, found.train) + documents(found.tokenizer, found.held_out)) == text


def test_bar_shows_every_stage(tmp_path, capsys):
    with progress_bar() as show:
        prepare(CORPUS, RANKS, tmp_path, progress=show)
    shown = capsys.readouterr().out
    for stage in ("train the vocabulary", "encode train", "encode held-out"):
        assert stage in shown


def test_meta_is_readable(cache):
    (folder,) = cache.iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    assert set(meta["files"]) == set(NAMES) - {"meta.json"} and meta["counts"]["files"] == len(CORPUS)
    assert TokenArray._fields == ("tokens", "offsets")
