"""What an experiment is, and how its record, table and figure are written.

    record  docs/experiments/records/NAME.json   what was measured, where, when, and with which versions
    table   docs/experiments/tables/NAME.md      written from the record; the page docs/experiments/NAME.md includes it
    figure  docs/experiments/figures/NAME.svg    drawn from the record

A table or figure knows nothing but the record, so it can always be made anew from the committed file.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import openk3
from openk3 import disk

Record = dict[str, Any]
WORK = Path("runs/experiments")  # where the training runs of all experiments live


@dataclass(frozen=True)
class Experiment:
    """One question and the way to its answer.

    run(work, jobs): does what is to be done, at most `jobs` single-threaded processes at a time, in the folder
    `work` where it may keep what makes a second call shorter. It returns {"rows": [...], "summary": {...}} of plain
    JSON values, one row a line of the table. It may add "corpus" (the hash), and "date", "versions" and "machine"
    where the measuring was not done just now (pool.provenance); else those of this moment are filled in.
    """

    name: str
    question: str
    rows: tuple[int, ...]  # of tests/checklist_rows.toml
    run: Callable[[Path, int], Record]
    table: Callable[[Record], str]
    figure: Callable[[Record, Path], None]


def conduct(experiment: Experiment, jobs: int, out: Path, work: Path = WORK) -> list[Path]:
    """Run an experiment and write record, table and figure under `out`. Returns their paths.

    Raises ValueError for fewer jobs than one, Failure when a run fails.
    """
    if jobs < 1:
        raise ValueError(f"--jobs {jobs} must be at least 1")
    work.mkdir(parents=True, exist_ok=True)
    body = experiment.run(work, jobs)
    head = {
        "name": experiment.name,
        "question": experiment.question,
        "checklist": list(experiment.rows),
        "command": f"openk3 experiment {experiment.name}",
        "date": today(),
        "versions": versions(),
        "machine": machine(jobs),
    }
    return write(experiment, head | body, out)


def write(experiment: Experiment, record: Record, out: Path) -> list[Path]:
    """Record, table and figure of a finished experiment under `out`. Raises ValueError for a NaN in the record."""
    places = [
        Path(out, folder, experiment.name + end)
        for folder, end in (("records", ".json"), ("tables", ".md"), ("figures", ".svg"))
    ]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
    disk.write_file(places[0], dumps(record))
    disk.write_file(places[1], experiment.table(record).rstrip() + "\n\n" + footnote(record) + "\n")
    experiment.figure(record, places[2])
    return places


def dumps(record: Record) -> str:
    """JSON with one key a line, and a list of numbers on one line. Raises ValueError for a NaN."""
    text = json.dumps(record, indent=1, allow_nan=False)
    return re.sub(r"\[\s+([-+.\deE,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others stand to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def footnote(record: Record) -> str:
    """Where the numbers of a table come from, one line."""
    seen = record["machine"]
    parts = [f"`{record['command']}`", record["date"], f"torch {record['versions']['torch']}"]
    parts.append(f"{seen['cpu']}, {seen['jobs']} at a time, one thread each")
    if record.get("corpus"):
        parts.append(f"corpus `{record['corpus'][:12]}`")
    return "*" + "; ".join(parts) + "*"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "openk3": openk3.__version__}


def machine(jobs: int) -> Record:
    """The CPU's name, the cores this process may use, and how many processes ran side by side."""
    return {"cpu": cpu_name(), "cores": cores(), "jobs": jobs}


def cpu_name() -> str:
    """As the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
