"""Training runs of an experiment: single-threaded `openk3 train` processes, so many at a time.

A run's folder is named by the hash of its resolved recipe. So a run is never done twice, two experiments that need the
same run share it, and a run that was stopped goes on from its last checkpoint. A finished run keeps its metrics; its
checkpoints go unless asked for, because they are nearly all of its size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from openk3 import disk
from openk3.errors import Failure
from openk3.evals.experiments.base import Record, cores, cpu_name, today, versions
from openk3.train import folder as names
from openk3.train.prepare import encode, read_corpus
from openk3.train.recipe import Recipe, load_recipe
from openk3.train.report_read import read_run

ENDED, LOG = "ended.json", "log.txt"
POLL_SECONDS = 0.2
GRACE_SECONDS = 60.0  # a stopped run finishes its step and saves
NOT_FINITE = "is not finite"  # what the trainer says of a run that diverged


@dataclass(frozen=True)
class Job:
    """One training run: `openk3 train RECIPE --set ...`.

    watch: name of an observer (train/watch.py) that adds fields to the "train" lines; keep: leave the last checkpoint.
    """

    label: str
    recipe: str
    overrides: tuple[str, ...] = ()
    watch: str = ""
    keep: bool = False

    def resolved(self) -> Recipe:
        return load_recipe(self.recipe, self.overrides)

    def folder(self, work: Path) -> Path:
        """Where the run lives: a name that people can read, and what makes it this run."""
        recipe = self.resolved()
        digest = hashlib.sha256(f"{recipe.to_toml()}\n{self.watch}".encode()).hexdigest()
        return work / f"{recipe.size}-{digest[:12]}"

    def command(self, folder: Path) -> list[str]:
        sets = [word for override in self.overrides for word in ("--set", override)]
        watch = ["--watch", self.watch] if self.watch else []
        return [sys.executable, "-m", "openk3.cli", "train", self.recipe, *sets, *watch, "--run", str(folder.resolve())]


@dataclass(frozen=True)
class Outcome:
    """A run that has ended. `records` is metrics.jsonl by kind; `diverged` is what the trainer said, if it did."""

    job: Job
    folder: Path
    records: dict[str, list[Record]]
    diverged: str
    ended: Record  # date, seconds, versions, cpu, cores, jobs

    @property
    def train(self) -> list[Record]:
        return self.records.get("train", [])

    @property
    def bpb(self) -> float | None:
        """Bits per byte over all held-out text after the last step; None if the run diverged."""
        return None if self.diverged else self.records["eval"][-1]["bpb"]


def run_all(jobs: Sequence[Job], at_a_time: int, work: Path) -> dict[str, Outcome]:
    """Bring every job to its end, in this order; outcomes by label.

    Raises ValueError when two jobs share a label, Failure when a run fails in any other way than by diverging. Then,
    and on Ctrl-C, the other runs save and stop; the same call goes on from there.
    """
    if len({job.label for job in jobs}) < len(jobs):
        raise ValueError("two runs of an experiment have the same label")
    folders = {job.label: job.folder(work) for job in jobs}
    waiting = {folders[job.label]: job for job in jobs if not ended(folders[job.label], job.keep)}
    prepare_text(waiting.values())
    with progress(len(waiting)) as screen:
        Pool(waiting, at_a_time, screen).run()
    return {job.label: outcome(job, folders[job.label]) for job in jobs}


def ended(folder: Path, keep: bool) -> bool:
    """Whether a run has come to its end, and still has the checkpoint that is wanted of it."""
    if not (folder / ENDED).exists():
        return False
    diverged = json.loads((folder / ENDED).read_text(encoding="utf-8"))["diverged"]
    return bool(diverged) or not keep or any((folder / names.CHECKPOINTS).glob("step-*"))


def outcome(job: Job, folder: Path) -> Outcome:
    how = json.loads((folder / ENDED).read_text(encoding="utf-8"))
    return Outcome(job, folder, read_run(folder).records, how["diverged"], how)


def prepare_text(jobs: Iterable[Job]) -> None:
    """Fill the cache before the processes start, so that they do not all do the same work."""
    seen = {}
    for job in jobs:
        recipe = job.resolved()
        seen[recipe.data, recipe.model.n_ranks] = recipe
    for recipe in seen.values():
        encode(read_corpus(recipe.data), recipe, shown=True)


def provenance(outcomes: Sequence[Outcome]) -> Record:
    """The fields "corpus", "date", "versions" and "machine" of a record, from where its runs ran.

    Raises Failure when runs that are to be compared saw different text or ran under different versions.
    """
    hashes = {outcome.records["corpus"][0]["hash"] for outcome in outcomes}
    if len(hashes) > 1:
        raise Failure(f"the runs saw different text (corpora {', '.join(sorted(h[:12] for h in hashes))})")
    made = [outcome.ended for outcome in outcomes]
    if any(one["versions"] != made[0]["versions"] for one in made):
        raise Failure("the runs were made under different versions of Python, torch or openk3; remove the older ones")
    return {
        "corpus": hashes.pop(),
        "date": max(one["date"] for one in made),
        "versions": made[0]["versions"],
        "machine": {
            "cpu": ", ".join(sorted({one["cpu"] for one in made})),
            "cores": max(one["cores"] for one in made),
            "jobs": max(one["jobs"] for one in made),
            "seconds": round(sum(one["seconds"] for one in made), 1),
        },
    }


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """One bar for all runs, and one for each that is under way."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not total) as screen:
        yield screen


class Pool:
    """Processes under way. `waiting` is run folder -> job."""

    def __init__(self, waiting: dict[Path, Job], at_a_time: int, screen: Progress):
        self.queue = list(waiting.items())
        self.at_a_time, self.screen = at_a_time, screen
        self.running: dict[Path, tuple[Job, subprocess.Popen, TaskID, float]] = {}
        self.all = screen.add_task("all runs", total=len(self.queue))

    def run(self) -> None:
        try:
            while self.queue or self.running:
                while self.queue and len(self.running) < self.at_a_time:
                    self.start(*self.queue.pop(0))
                time.sleep(POLL_SECONDS)
                for folder in list(self.running):
                    self.look(folder)
        finally:
            self.stop()

    def start(self, folder: Path, job: Job) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with open(folder / LOG, "w", encoding="utf-8") as log:
            command = job.command(folder)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        task = self.screen.add_task(job.label, total=job.resolved().steps)
        self.running[folder] = job, process, task, time.monotonic()

    def look(self, folder: Path) -> None:
        """See how far a run is; close it when it has ended. Raises Failure when it failed."""
        job, process, task, began = self.running[folder]
        code = process.poll()
        self.screen.update(task, completed=last_step(folder / names.METRICS))
        if code is None:
            return
        del self.running[folder]
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
        diverged = text.strip().splitlines()[-1] if code == 1 and NOT_FINITE in text else ""
        if code and not diverged:
            raise Failure(f"run {job.label!r} failed (exit code {code}); {folder / LOG} says why")
        if not diverged and not evaluated(folder, job.resolved().steps):
            raise KeyboardInterrupt  # the run itself was asked to stop, and has saved
        close(folder, job, diverged, time.monotonic() - began, self.at_a_time)
        self.screen.update(task, visible=False)
        self.screen.advance(self.all)

    def stop(self) -> None:
        """Ask what still runs to save and stop, and wait for it."""
        for _, process, _, _ in self.running.values():
            process.terminate()
        limit = time.monotonic() + GRACE_SECONDS
        for _, process, _, _ in self.running.values():
            try:
                process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def close(folder: Path, job: Job, diverged: str, seconds: float, at_a_time: int) -> None:
    """Write down how a run ended, and drop the checkpoints nobody asked for."""
    how = {"label": job.label, "diverged": diverged.removeprefix("openk3: "), "date": today(), "seconds": seconds}
    how |= {"versions": versions(), "cpu": cpu_name(), "cores": cores(), "jobs": at_a_time}
    disk.write_file(folder / ENDED, json.dumps(how, indent=1) + "\n")
    if diverged or not job.keep:
        shutil.rmtree(folder / names.CHECKPOINTS, ignore_errors=True)


def evaluated(folder: Path, steps: int) -> bool:
    """Whether the evaluation after the last step was written."""
    evals = read_run(folder).of("eval")
    return bool(evals) and evals[-1]["step"] == steps


def last_step(metrics: Path) -> int:
    """How far a run is, to be shown: the step of its last line, 0 where that cannot be read just now."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, metrics.stat().st_size - (1 << 16)))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError, KeyError):
        return 0
