"""The command line: one sentence and the exit code, whatever goes wrong."""

import sys
import threading

import pytest

from openk3 import cli
from openk3.errors import Failure, UserError


def told(monkeypatch, capsys, error):
    """(exit code, what is printed) of a command that raises `error`."""

    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["openk3"])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("no such run"), 2, "openk3: no such run"),
        (ValueError("two\nlines"), 2, "openk3: two lines"),
        (Failure("a NaN"), 1, "openk3: a NaN"),
        (IsADirectoryError(21, "Is a directory", "runs/a/metrics.jsonl"), 2, "openk3: runs/a/metrics.jsonl: Is a dir"),
        (PermissionError(13, "Permission denied", "x"), 2, "openk3: x: Permission denied"),
        (OSError(28, "No space left on device"), 1, "openk3: No space left on device"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "openk3: there is not enough memory (Default"),
        (MemoryError(), 1, "openk3: there is not enough memory (MemoryError)"),
        (KeyError("x"), 1, "openk3: internal error, KeyError: 'x' (`openk3 --debug ...` shows where)"),
    ],
)
def test_an_error_is_one_sentence_and_a_code(monkeypatch, capsys, error, code, words):
    found, printed = told(monkeypatch, capsys, error)
    assert found == code
    assert printed.startswith(words) and printed.count("\n") == 1


def test_a_thread_that_cannot_write_prints_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", cli.quiet_writer)

    def fail(error):
        raise error

    for error in (OSError(28, "No space left on device"), KeyError("x")):
        thread = threading.Thread(target=fail, args=(error,))
        thread.start()
        thread.join()
    printed = capsys.readouterr().err
    assert "KeyError" in printed and "No space" not in printed


def test_debug_shows_where(monkeypatch, capsys):
    def fail():
        raise KeyError("x")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["openk3", "--debug", "train"])
    with pytest.raises(KeyError):
        cli.main()
