"""The bar of a training run, and how Ctrl-C reaches it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Display:
    """A bar with loss, bits per byte, tokens per second, time left and the worst expert load; silent if not shown."""

    def __init__(self, steps: int, shown: bool):
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
        )
        self.console = Console(quiet=not shown)
        self.bar = Progress(*columns, console=self.console, disable=not shown, refresh_per_second=4)
        self.steps = steps
        self.task: TaskID | None = None

    @contextmanager
    def at(self, step: int) -> Iterator[Display]:
        """The bar on the screen, beginning at a step."""
        self.task = self.bar.add_task("training", total=self.steps, completed=step, figures="")
        with self.bar:
            yield self

    def step(self, line: dict[str, Any]) -> None:
        """Show one "train" line."""
        worst = 1 + max(line["maxvio"], default=0.0)
        figures = f"loss {line['loss']:.3f}  bpb {line['bpb']:.3f}  {line['tok_per_s']:,.0f} tok/s  load {worst:.2f}x"
        if self.task is not None:
            self.bar.update(self.task, advance=1, figures=figures)

    def say(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text, highlight=False)


@contextmanager
def interrupts(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C or SIGTERM has come; a second Ctrl-C stops at once.

    Outside the main thread signals cannot be caught, and it always says no.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: Any) -> None:
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)
        say("stopping after this step; Ctrl-C again stops at once, back to the last checkpoint")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
