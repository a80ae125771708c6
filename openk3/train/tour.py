"""`openk3 tour`: what K3 is made of, a small one trained on real text before your eyes, and what it learned."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openk3.config import named
from openk3.errors import UserError
from openk3.model.audit import audit
from openk3.model.tables import parameter_table
from openk3.train.loop import train
from openk3.train.recipe import load_recipe
from openk3.train.report import write_report

RECIPE = "nano"


def tour(run: Path, overrides: list[str]) -> None:
    """Print the parameter table of K3, train `nano` into `run` (or go on with it), show samples, write the report.

    Raises UserError and Failure as training does.
    """
    console = Console()
    recipe = load_recipe(RECIPE, overrides)
    k3 = named("k3")
    console.print(parameter_table("1. What Kimi K3 is made of", audit(k3, vision=True, packed=True), k3))
    console.print()
    console.print(parameter_table(f"2. The same shape, small: {recipe.size}", audit(recipe.model), recipe.model))
    console.print(
        "\n[bold]3. Training it[/] on Python's own standard library. Ctrl-C saves; the same command goes on.\n"
    )
    if train(recipe, run).interrupted:
        return
    lines = read_lines(run / "metrics.jsonl")
    console.print("\n[bold]4. What it wrote as it learned[/]: the same prompts and seeds each time\n")
    show_samples(console, lines)
    console.print(results(lines))
    report = write_report(run)
    console.print(
        Panel(
            f"The report, with plots of what makes K3 different: [bold]{report}[/]\n\n"
            "What to try next:\n"
            f"  openk3 generate {run} --prompt 'def fibonacci(n):'\n"
            "  openk3 train k2like\n"
            "      what K3 replaced, at the same active size\n"
            "  openk3 train nano --set model.residual=plain --run plain\n"
            "      without Attention Residuals\n"
            "  openk3 train nano --set data.source='texts/*.txt' --run mine\n"
            "      on your own text",
            title="Done",
            title_align="left",
        )
    )


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def show_samples(console: Console, lines: list[dict]) -> None:
    """All samples, prompt by prompt, in the order of training."""
    samples = [line for line in lines if line["kind"] == "sample"]
    for prompt in dict.fromkeys(line["prompt"] for line in samples):
        for line in (x for x in samples if x["prompt"] == prompt):
            body = Text(line["prompt"], style="bold") + Text(line["text"])
            console.print(Panel(body, title=f"step {line['step']}, {line['tokens']:,} tokens", title_align="left"))


def results(lines: list[dict]) -> Table:
    """Held-out bits per byte beside the byte-context model's."""
    corpus = next((line for line in lines if line["kind"] == "corpus"), None)
    last = next((line for line in reversed(lines) if line["kind"] == "eval"), None)
    if corpus is None or last is None:
        raise UserError("metrics.jsonl of this run was cut short; choose another run name for a whole tour")
    table = Table(title="5. Held-out bits per byte (lower is better)", title_justify="left")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    table.add_row(f"{RECIPE}, {last['tokens']:,} tokens seen", f"{last['bpb']:.3f}")
    table.add_row("order-5 byte-context model, same bytes", f"{corpus['order5_bpb']:.3f}")
    table.caption = f"corpus {corpus['hash'][:12]}: {corpus['files']} files, {corpus['bytes']:,} bytes"
    return table
