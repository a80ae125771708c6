"""Where text comes from, and how it is split into training and held-out documents.

    stdlib          Python's own standard library without its tests: on every machine, 12.1 MB in Python 3.11
    installed       that, and the source files of the installed packages
    hf:NAME         a data set through the optional package `datasets`
    anything else   a glob of UTF-8 text files, or of .jsonl files with a "text" field a line

A corpus is a list of documents in a fixed order, so its hash names it exactly. Held-out documents are chosen
by a hash of their path: adding a file moves no other file across the split (decisions.md).
"""

import difflib
import glob
import hashlib
import importlib
import json
import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HELD_OUT_FRACTION = 0.04
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SPEC_KEYS = ("source", "split", "field", "subset", "limit")


class Document(NamedTuple):
    """One text and the path that names it."""

    path: str
    text: str


class Corpus(list[Document]):
    """Documents in a fixed order; `skipped` counts the files that were left out as undecodable."""

    skipped: int = 0


def python_files(folder: Path) -> list[Path]:
    """Every .py file below folder outside test folders, sorted by its relative path."""
    found = []
    for parent, children, names in os.walk(folder):
        children[:] = [name for name in children if name not in SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def python_corpus(folder: Path, prefix: str = "") -> Corpus:
    """The .py files below folder; files that are empty hold nothing, files that are not UTF-8 are counted."""
    corpus = Corpus()
    for path in python_files(folder):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            corpus.skipped += 1
            continue
        if text:
            corpus.append(Document(prefix + path.relative_to(folder).as_posix(), text))
    return corpus


def stdlib_corpus() -> Corpus:
    """Python's standard library without test folders, paths relative to it; no two versions are alike."""
    return python_corpus(Path(sysconfig.get_path("stdlib")))


def installed_corpus() -> Corpus:
    """The standard library and the source files of all installed packages, each text once.

    Packages carry copies of each other's files; without the rule a copy could stand on both sides of the
    split.
    """
    corpus = stdlib_corpus()
    seen = {document.text for document in corpus}
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        packages = python_corpus(Path(folder), prefix="site-packages/")
        corpus.skipped += packages.skipped
        for document in packages:
            if document.text not in seen:
                seen.add(document.text)
                corpus.append(document)
    return corpus


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ValueError, naming the file, when it is binary or empty."""
    data = path.read_bytes()
    if b"\0" in data:
        raise ValueError(f"{path} is binary (a NUL byte at {data.index(0)}); a corpus takes UTF-8 text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); convert it or leave it out") from None
    if not text.strip():
        raise ValueError(f"{path} holds no text; leave it out of the corpus")
    return text


def well_formed(text: str) -> str:
    """Text with lone surrogates, which a JSON escape can bring in and UTF-8 cannot write, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def path_bytes(path: str) -> bytes:
    """UTF-8 of a path; undecodable bytes of a file name come back as they are."""
    return path.encode("utf-8", "surrogateescape")


def read_jsonl(path: Path, name: str, field: str = "text") -> list[Document]:
    """One document a line of a JSONL file, named NAME:LINE. Raises ValueError naming the file and line."""
    documents = []
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise ValueError(f'{path}, line {number}: expected a JSON object with a "{field}" field') from None
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f'{path}, line {number}: "{field}" must be a text that is not empty')
        documents.append(Document(f"{name}:{number}", well_formed(text)))
    return documents


def fixed_folder(pattern: str) -> str:
    """The folder in front of the first wildcard of an absolute pattern."""
    parts = Path(pattern).parts[:-1]
    wild = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return os.path.join(*parts[:wild])


def glob_corpus(patterns: str | os.PathLike | Sequence[str], field: str = "text") -> Corpus:
    """Text files and .jsonl files that match one or several glob patterns (`**` spans folders).

    Paths are relative to the part of the patterns before their wildcards, so the split does not depend on
    where the folder stands. Raises ValueError when a pattern matches no file, or a file is empty, binary or
    malformed.
    """
    single = isinstance(patterns, str | os.PathLike)
    absolute = [os.path.abspath(os.path.expanduser(p)) for p in ([patterns] if single else patterns)]
    if not absolute:
        raise ValueError("a corpus needs at least one glob pattern, got an empty list")
    files = set()
    for pattern in absolute:
        matches = [match for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
        if not matches:
            hint = f"; for every file in it write {pattern}/**/*" if os.path.isdir(pattern) else ""
            raise ValueError(f"no file matches {pattern}{hint}")
        files.update(matches)
    root = os.path.commonpath([fixed_folder(pattern) for pattern in absolute])
    corpus = Corpus()
    for name, path in sorted((Path(os.path.relpath(file, root)).as_posix(), Path(file)) for file in files):
        if path.suffix == ".jsonl":
            corpus += read_jsonl(path, name, field)
        else:
            corpus.append(Document(name, read_text(path)))
    return corpus


def hf_corpus(
    name: str, split: str = "train", field: str = "text", subset: str | None = None, limit: int | None = None
) -> Corpus:
    """The rows of a data set of the Hugging Face hub; with limit, the first ones, read as a stream.

    Raises ValueError when the package `datasets` is missing, the field is not there, or no row has text.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(f"hf:{name} needs the package `datasets`: pip install 'openk3[data]'") from None
    rows = datasets.load_dataset(name, subset, split=split, streaming=limit is not None)
    corpus = Corpus()
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            break
        if field not in row:
            raise ValueError(f"hf:{name} has no field {field!r}; its fields are {', '.join(sorted(row))}")
        if row[field]:
            corpus.append(Document(f"{name}/{split}:{number}", well_formed(row[field])))
    if not corpus:
        raise ValueError(f"hf:{name}, split {split}: no row has text in {field!r}")
    return corpus


def load_corpus(spec: str | Sequence[str] | Mapping[str, Any]) -> Corpus:
    """One entry to every source.

    spec: "stdlib", "installed", "hf:NAME", a glob or a list of globs; or a table with the key `source`
    holding one of these, and `field` (JSONL and hf), `split`, `subset`, `limit` (hf). Raises ValueError for
    anything else.
    """
    if not isinstance(spec, Mapping):
        spec = {"source": spec}
    options = {key: value for key, value in spec.items() if key != "source"}
    for key in spec:
        if key not in SPEC_KEYS:
            near = difflib.get_close_matches(str(key), SPEC_KEYS, n=1, cutoff=0)[0]
            raise ValueError(f"a corpus has no key {key!r}; did you mean {near!r}?")
    source = spec.get("source")
    if not source:
        raise ValueError('a corpus needs a source: "stdlib", "installed", "hf:NAME" or a glob')
    hub = isinstance(source, str) and source.startswith("hf:")
    allowed = SPEC_KEYS if hub else () if source in ("stdlib", "installed") else ("field",)
    for key in options:
        if key not in allowed:
            raise ValueError(f"the corpus {source!r} takes no {key!r}")
    if hub:
        return hf_corpus(source.removeprefix("hf:"), **options)
    if source == "stdlib":
        return stdlib_corpus()
    if source == "installed":
        return installed_corpus()
    return glob_corpus(source, **options)


def corpus_hash(corpus: Sequence[Document]) -> str:
    """SHA-256 over paths and texts, in order and with their lengths: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for document in corpus:
        for data in (path_bytes(document.path), document.text.encode()):
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def path_fraction(path: str) -> float:
    """A number in [0, 1) that depends on the path alone.

    BLAKE2b and not SHA-256: by chance the latter holds out one file that is three quarters of its 4 % of the
    standard library.
    """
    return int.from_bytes(hashlib.blake2b(path_bytes(path), digest_size=6).digest(), "big") / 2**48


def split(corpus: Sequence[Document], held_out: float = HELD_OUT_FRACTION) -> tuple[Corpus, Corpus]:
    """(training, held-out) documents, in corpus order; about the fraction held_out is held out.

    The rule looks only at paths. A side that would stay empty gets the nearest document; of a single document
    the tail is held out. Raises ValueError for a corpus that cannot have two sides.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"the held-out fraction must be between 0 and 1, got {held_out}")
    if len(corpus) == 1:
        return split_document(corpus[0], held_out)
    if not corpus:
        raise ValueError("an empty corpus cannot be split; add documents")
    fractions = [path_fraction(document.path) for document in corpus]
    held = {i for i, fraction in enumerate(fractions) if fraction < held_out}
    by_fraction = sorted(range(len(corpus)), key=lambda i: (fractions[i], i))
    held.add(by_fraction[0])
    held.discard(by_fraction[-1])
    train = Corpus(document for i, document in enumerate(corpus) if i not in held)
    return train, Corpus(corpus[i] for i in sorted(held))


def split_document(document: Document, held_out: float) -> tuple[Corpus, Corpus]:
    """Hold out the last characters of a corpus that is one document."""
    size = max(1, round(held_out * len(document.text)))
    head, tail = document.text[:-size], document.text[-size:]
    if not head:
        raise ValueError(f"{document.path} is the whole corpus and too short to hold a part out; add text")
    return Corpus([Document(document.path, head)]), Corpus([Document(document.path + "#tail", tail)])
