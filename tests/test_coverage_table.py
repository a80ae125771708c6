"""The coverage table: markers are found wherever pytest finds them, and --check fails for every reason to fail."""

import coverage_table
import pytest

ROWS = """
required = [1, 3]
[rows]
1 = "one"
2 = "two"
3 = "three"
"""
TESTS = """
import pytest
pytestmark = pytest.mark.row(1)

def test_module(): ...

class TestGroup:
    @pytest.mark.slow
    @pytest.mark.row(3, 2)
    @pytest.mark.row(3)
    def test_method(self): ...

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=[pytest.mark.row(2), pytest.mark.slow])])
def test_param(x): ...

@pytest.mark.row(2)
def helper(): ...
"""


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "tests/deep").mkdir(parents=True)
    (tmp_path / "tests/checklist_rows.toml").write_text(ROWS)
    (tmp_path / "tests/deep/test_it.py").write_text(TESTS)
    return tmp_path


def test_markers_of_module_class_function_and_parameter(repository):
    assert coverage_table.main([], repository) == 0
    lines = (repository / "docs/coverage.md").read_text().splitlines()[-3:]
    assert lines == [
        "| 1 | one | deep/test_it.py: test_module, test_method (slow), test_param |",
        "| 2 | two | deep/test_it.py: test_method (slow), test_param |",
        "| 3 | three | deep/test_it.py: test_method (slow) |",
    ]
    assert coverage_table.main(["--check"], repository) == 0


def test_check_fails_when_a_test_was_added(repository, capsys):
    coverage_table.main([], repository)
    (repository / "tests/test_new.py").write_text("import pytest\n@pytest.mark.row(2)\ndef test_more(): ...\n")
    assert coverage_table.main(["--check"], repository) == 1
    assert capsys.readouterr().err == "docs/coverage.md is stale: run `make coverage-table`\n"


def test_check_fails_for_a_required_row_without_a_test(repository, capsys):
    file = repository / "tests/deep/test_it.py"
    file.write_text(TESTS.replace("row(3, 2)", "row(2)").replace("row(3)", "row(2)"))
    coverage_table.main([], repository)
    assert coverage_table.main(["--check"], repository) == 1
    assert capsys.readouterr().err == "row 3 (three) has no test\n"


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("row(4)", "test_bad.py: test_x is marked with row 4; rows are 1 to 3"),
        ("row(N)", "test_bad.py:2: pytest.mark.row(N) must hold plain row numbers"),
        ("row('1')", "test_bad.py:2: pytest.mark.row('1') must hold plain row numbers"),
        ("row(True)", "test_bad.py:2: pytest.mark.row(True) must hold plain row numbers"),
    ],
)
def test_wrong_row_numbers_are_refused(repository, capsys, marker, message):
    (repository / "tests/test_bad.py").write_text(f"import pytest\n@pytest.mark.{marker}\ndef test_x(): ...\n")
    assert coverage_table.main([], repository) == 1
    assert capsys.readouterr().err == message + "\n"
    assert not (repository / "docs").exists()


def test_rows_are_numbered_without_a_gap():
    rows = coverage_table.tomllib.loads((coverage_table.ROOT / "tests/checklist_rows.toml").read_text())
    assert sorted(map(int, rows["rows"])) == list(range(1, 168))
    assert set(rows["required"]) <= set(range(1, 168))
