"""Which test proves which component: joins the `row` markers of the tests with checklist_rows.toml.

    python tests/coverage_table.py            writes docs/coverage.md
    python tests/coverage_table.py --check    fails when that file is stale or a required row has no test

The tests are read, not imported, so that this takes a moment and needs nothing but Python.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Which test proves which component

Written by `make coverage-table` from the `row` markers of the tests; do not edit. A test stands here if it fails
when the component is broken. {done} of {total} components have one so far.

| row | component | tests |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class Proof:
    """One test, and the rows it is marked with."""

    file: str
    test: str
    rows: tuple[int, ...]
    slow: bool


def proofs(tests: Path) -> list[Proof]:
    """All marked tests under a folder. Raises ValueError for a marker that is not plain row numbers."""
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=name)
        module_marks = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]
        ]
        found += marked(tree.body, module_marks, name)
    return found


def marked(body: list[ast.stmt], marks: list[ast.expr], file: str) -> Iterator[Proof]:
    """The marked tests of a module or class body; `marks` are those that hold for the whole of it."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from marked(node.body, marks + node.decorator_list, file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            own = marks + node.decorator_list
            rows = tuple(dict.fromkeys(row for mark in own for row in row_numbers(mark, file)))
            if rows:
                yield Proof(file, node.name, rows, any(ast.unparse(mark) == "pytest.mark.slow" for mark in own))


def row_numbers(mark: ast.expr, file: str) -> Iterator[int]:
    """Numbers of every pytest.mark.row(...) in an expression, also inside pytest.param(..., marks=...)."""
    for node in ast.walk(mark):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row":
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or type(argument.value) is not int:
                    raise ValueError(f"{file}:{node.lineno}: {ast.unparse(node)} must hold plain row numbers")
                yield argument.value


def table(names: dict[int, str], tests: list[Proof]) -> str:
    """The Markdown page. Raises ValueError for a test marked with a row that does not exist."""
    by_row: dict[int, dict[str, list[str]]] = {row: {} for row in names}
    for proof in tests:
        for row in proof.rows:
            if row not in by_row:
                raise ValueError(f"{proof.file}: {proof.test} is marked with row {row}; rows are 1 to {max(names)}")
            label = f"{proof.test} (slow)" if proof.slow else proof.test
            by_row[row].setdefault(proof.file, []).append(label)
    lines = []
    for row, name in sorted(names.items()):
        cell = "<br>".join(f"{file}: {', '.join(labels)}" for file, labels in by_row[row].items())
        lines.append(f"| {row} | {name} | {cell} |\n")
    return HEAD.format(done=sum(map(bool, by_row.values())), total=len(names)) + "".join(lines)


def problems(rows: dict, tests: list[Proof], page: str, written: str) -> list[str]:
    """What --check complains about, one sentence each."""
    proved = {row for proof in tests for row in proof.rows}
    missing = [f"row {row} ({rows['rows'][str(row)]}) has no test" for row in rows["required"] if row not in proved]
    stale = [] if page == written else ["docs/coverage.md is stale: run `make coverage-table`"]
    return missing + stale


def main(arguments: list[str], root: Path = ROOT) -> int:
    rows = tomllib.loads((root / "tests/checklist_rows.toml").read_text(encoding="utf-8"))
    target = root / "docs/coverage.md"
    try:
        tests = proofs(root / "tests")
        page = table({int(row): name for row, name in rows["rows"].items()}, tests)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments == ["--check"]:
        found = problems(rows, tests, page, target.read_text(encoding="utf-8") if target.exists() else "")
        print("\n".join(found), file=sys.stderr, end="\n" if found else "")
        return 1 if found else 0
    target.parent.mkdir(exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
