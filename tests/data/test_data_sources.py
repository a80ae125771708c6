import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.data import sources
from openk3.data.sources import Corpus, Document, corpus_hash, glob_corpus, load_corpus, path_fraction, split


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_standard_library():
    corpus = load_corpus("stdlib")
    paths = [document.path for document in corpus]
    assert paths == sorted(paths) and len(set(paths)) == len(paths)
    assert {"ast.py", "json/decoder.py", "this.py"} <= set(paths)
    folders = {part for path in paths for part in path.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    num_bytes = sum(len(document.text.encode()) for document in corpus)
    assert 8e6 < num_bytes < 20e6  # 12.1 MB in Python 3.11
    source = Path(sysconfig.get_path("stdlib"), "this.py").read_bytes()
    assert dict(corpus)["this.py"].encode() == source
    again = sources.stdlib_corpus()
    assert again == corpus and corpus_hash(again) == corpus_hash(corpus)
    train, held_out = split(corpus)
    held_bytes = sum(len(document.text.encode()) for document in held_out)
    assert 0.02 < len(held_out) / len(corpus) < 0.07 and 0.02 < held_bytes / num_bytes < 0.07
    assert sorted(train + held_out) == corpus


def test_python_corpus_skips_and_counts(tmp_path):
    write(
        tmp_path,
        {"b.py": "b = 1\r\n", "a/z.py": "z", "a.py": "a", "latin.py": b"\xe9", "empty.py": "", "c.txt": "c"},
    )
    write(tmp_path, {"test/t.py": "t", "a/tests/t.py": "t", "a/idle_test/t.py": "t", "a/__pycache__/t.py": "t"})
    corpus = sources.python_corpus(tmp_path, prefix="p/")
    assert corpus == [("p/a.py", "a"), ("p/a/z.py", "z"), ("p/b.py", "b = 1\r\n")]
    assert corpus.skipped == 1


def test_installed_corpus_keeps_each_text_once(tmp_path, monkeypatch):
    write(tmp_path, {"std/a.py": "one", "std/site-packages/x.py": "no", "site/b.py": "one", "site/c.py": "two"})
    write(tmp_path, {"site/d/e.py": "two", "site/d/f.py": b"\xff"})
    folders = {"stdlib": tmp_path / "std", "purelib": tmp_path / "site", "platlib": tmp_path / "site"}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folders[name]))
    corpus = load_corpus("installed")
    assert corpus == [("a.py", "one"), ("site-packages/c.py", "two")] and corpus.skipped == 1


def test_glob_of_text_files(tmp_path):
    write(
        tmp_path,
        {"x/b.txt": "bee\n", "x/a.txt": "ay", "x/deep/c.txt": "\u4e2d", "y/d.md": "dee", "y/e.bin": b"\0"},
    )
    assert glob_corpus(f"{tmp_path}/x/*.txt") == [("a.txt", "ay"), ("b.txt", "bee\n")]
    assert glob_corpus(f"{tmp_path}/x/a.txt") == [("a.txt", "ay")]
    both = load_corpus([f"{tmp_path}/x/**/*.txt", f"{tmp_path}/y/*.md", f"{tmp_path}/x/a.txt"])
    assert [path for path, _ in both] == ["x/a.txt", "x/b.txt", "x/deep/c.txt", "y/d.md"]


def test_glob_paths_do_not_depend_on_the_folder(tmp_path, monkeypatch):
    write(
        tmp_path,
        {f"{home}/data/{name}": name for home in ("here", "far/away") for name in ("a.txt", "s/b.txt")},
    )
    here = glob_corpus(f"{tmp_path}/here/data/**/*.txt")
    assert here == glob_corpus(f"{tmp_path}/far/away/data/**/*.txt")
    monkeypatch.chdir(tmp_path / "here")
    assert here == glob_corpus("data/**/*.txt") == load_corpus({"source": "data/**/*.txt"})


def test_jsonl_lines_are_documents(tmp_path):
    rows = [
        json.dumps({"text": "one\nline", "id": 1}),
        "",
        json.dumps({"text": "\ud800x"}),
        '{"text": "\u2028"}',
    ]
    write(tmp_path, {"a.jsonl": "\ufeff" + "\r\n".join(rows[:3]), "b.jsonl": '{"body": "two\u2028"}\n'})
    assert load_corpus(f"{tmp_path}/a.jsonl") == [("a.jsonl:1", "one\nline"), ("a.jsonl:3", "\ufffdx")]
    assert load_corpus({"source": f"{tmp_path}/b.jsonl", "field": "body"}) == [("b.jsonl:1", "two\u2028")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", r"empty\.txt holds no text"),
        ("blank.txt", " \n\t", r"blank\.txt holds no text"),
        ("image.txt", b"PNG\0\1", r"image\.txt is binary \(a NUL byte at 3\)"),
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 \(byte 3\)"),
        ("cut.txt", b"ab\xe4\xb8", r"cut\.txt is not UTF-8 \(byte 2\)"),
        ("deep.jsonl", "[" * 100_000, r"deep\.jsonl, line 1: expected a JSON object"),
        ("bad.jsonl", '{"text": "a"}\n{"text": "b"', r"bad\.jsonl, line 2: expected a JSON object"),
        ("key.jsonl", '\n{"body": "a"}', r'key\.jsonl, line 2: expected a JSON object with a "text" field'),
        ("list.jsonl", '["text"]', r"list\.jsonl, line 1: expected a JSON object"),
        ("number.jsonl", '{"text": 5}', r"number\.jsonl, line 1: .*must be a text"),
        ("hollow.jsonl", '{"text": " "}', r"hollow\.jsonl, line 1: .*not empty"),
        ("none.jsonl", "", r"none\.jsonl holds no text"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    write(tmp_path, {"a.txt": "fine", name: content})
    with pytest.raises(ValueError, match=message):
        glob_corpus(f"{tmp_path}/*")


def test_nothing_matches(tmp_path):
    with pytest.raises(ValueError, match=r"no file matches .*\.rst"):
        glob_corpus(f"{tmp_path}/*.rst")
    with pytest.raises(ValueError, match=r"no file matches .*; for every file in it write .*/\*\*/\*"):
        glob_corpus(str(tmp_path))
    with pytest.raises(ValueError, match="at least one glob pattern"):
        glob_corpus([])


def fake_hub(monkeypatch, rows):
    calls = []

    def load_dataset(name, subset, *, split, streaming):
        calls.append((name, subset, split, streaming))
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_hub_data_set(monkeypatch):
    fake_hub(monkeypatch, [{"text": "a", "body": "x"}, {"text": "", "body": "y"}, {"text": "c", "body": "z"}])
    assert load_corpus("hf:org/set") == [("org/set/train:0", "a"), ("org/set/train:2", "c")]
    spec = {"source": "hf:org/set", "split": "test", "field": "body", "subset": "en", "limit": 1}
    calls = fake_hub(monkeypatch, [{"body": "x"}, {"body": "y"}])
    assert load_corpus(spec) == [("org/set/test:0", "x")]
    assert calls == [("org/set", "en", "test", True)]


def test_hub_errors(monkeypatch):
    fake_hub(monkeypatch, [{"body": "x", "id": 1}])
    with pytest.raises(ValueError, match="hf:s has no field 'text'; its fields are body, id"):
        load_corpus("hf:s")
    fake_hub(monkeypatch, [{"text": ""}])
    with pytest.raises(ValueError, match="no row has text"):
        load_corpus("hf:s")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package `datasets`: pip install 'openk3\[data\]'"):
        load_corpus("hf:s")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"sourse": "stdlib"}, "no key 'sourse'; did you mean 'source'"),
        ({"field": "text"}, "a corpus needs a source"),
        ("", "a corpus needs a source"),
        ({"source": "stdlib", "limit": 3}, "the corpus 'stdlib' takes no 'limit'"),
        ({"source": "*.txt", "split": "train"}, "takes no 'split'"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(spec)


def test_hash_tells_corpora_apart():
    corpora = [
        [("a", "bc"), ("d", "e")],
        [("a", "bc"), ("d", "f")],
        [("ab", "c"), ("d", "e")],
        [("d", "e"), ("a", "bc")],
        [("a", "bcde")],
        [],
    ]
    hashes = {corpus_hash([Document(*pair) for pair in corpus]) for corpus in corpora}
    assert len(hashes) == len(corpora)
    # The hash stands beside published figures and must stay what it is.
    written = b"".join(len(part).to_bytes(8, "little") + part for part in (b"a", b"bc", b"d", b"e"))
    assert corpus_hash([Document("a", "bc"), Document("d", "e")]) == hashlib.sha256(written).hexdigest()


def test_file_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    write(tmp_path, {name: "text", "b.txt": "more"})
    corpus = glob_corpus(f"{tmp_path}/*.txt")
    assert [path for path, _ in corpus] == ["b.txt", name] and len(corpus_hash(corpus)) == 64
    assert len(split(corpus)[0]) == len(split(corpus)[1]) == 1


@given(st.lists(st.text(max_size=8), min_size=2, max_size=60, unique=True), st.sampled_from([0.04, 0.3, 0.99]))
def test_split(paths, held_out):
    corpus = Corpus(Document(path, "x" + path) for path in paths)
    train, held = split(corpus, held_out)
    assert train and held and sorted(train + held) == sorted(corpus)
    assert train == [d for d in corpus if d in train] and held == [d for d in corpus if d in held]
    assert max(path_fraction(d.path) for d in held) < min(path_fraction(d.path) for d in train)
    free = {d.path for d in corpus if path_fraction(d.path) < held_out}
    assert len(free ^ {d.path for d in held}) <= 1
    moved, _ = split(corpus[::-1], held_out)
    assert sorted(moved) == sorted(train)


def test_split_share():
    corpus = [Document(f"folder/file{i}.py", "x") for i in range(20_000)]
    assert 0.036 < len(split(corpus)[1]) / len(corpus) < 0.044


def test_split_of_one_document():
    train, held = split([Document("a", "0123456789" * 10)])
    assert train == [("a", "0123456789" * 9 + "012345")] and held == [("a#tail", "6789")]
    assert split([Document("a", "xy")]) == ([("a", "x")], [("a#tail", "y")])
    with pytest.raises(ValueError, match="a is the whole corpus and too short"):
        split([Document("a", "x")])


def test_split_refuses():
    with pytest.raises(ValueError, match="empty corpus"):
        split([])
    for fraction in (0, 1, -0.1):
        with pytest.raises(ValueError, match=f"between 0 and 1, got {fraction}"):
            split([Document("a", "x")], fraction)
