"""`openk3 <verb>`: parses, calls one function, prints. No logic of its own.

Imports stand inside the verbs, so that `openk3 --help` answers at once.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from openk3.errors import Failure, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The whole Kimi K3 system in one readable codebase. Start with `openk3 tour`.",
)
WRONG_INPUT = (
    UserError,
    ValueError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
Set = Annotated[list[str] | None, typer.Option("--set", help="Override one recipe value: `section.key=value`.")]
Run = Annotated[str | None, typer.Option(help="Name of the run folder under `runs/`; the recipe's name without.")]


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Options before the verb."""


@app.command()
def tour(set_: Set = None, run: Run = "tour") -> None:
    """See what K3 is made of, train a small one on real text, and get a report of what it learned.

    Trains the `nano` size on Python's own standard library: about ten minutes on two CPU cores. Run it again
    and it goes on where it stopped.
    """
    from openk3.train.tour import tour as start

    start(Path("runs") / (run or "tour"), set_ or [])


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of one in `recipes/`: `nano`, `k2like`.")],
    set_: Set = None,
    run: Run = None,
    watch: Annotated[str | None, typer.Option(help="Write down more of each step: `activations` or `depth`.")] = None,
) -> None:
    """Train a model. Ctrl-C saves; the same command goes on from the last checkpoint.

    Examples:

        openk3 train nano
        openk3 train nano --set data.source='texts/*.txt' --run mine
        openk3 train nano --set model.residual=plain --set train.tokens=1000000 --run plain
    """
    from openk3.train.loop import train as start
    from openk3.train.recipe import load_recipe
    from openk3.train.watch import observer

    resolved = load_recipe(recipe, set_ or [])
    start(resolved, Path("runs") / (run or Path(recipe).stem), watch=observer(watch) if watch else None)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder, such as `runs/tour`.")]) -> None:
    """Write `report.html` for a run: losses, balance, AttnRes map, decay half-lives, samples."""
    from openk3.train.report import write_report

    print(write_report(run))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a checkpoint in it.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens holding this much of the mass.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
) -> None:
    """Let a trained model write on, token by token."""
    from openk3.train.sampling import stream

    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    for piece in stream(run, prompt, **settings):
        print(piece, end="", flush=True)
    print()


@app.command()
def audit(
    size: Annotated[str, typer.Argument(help="A named size: pico, nano, mini, small or k3.")] = "k3",
) -> None:
    """Count a model's parameters by part, without its weights. `k3` counts as it is released."""
    from openk3.model.tables import audit_table

    audit_table(size)


@app.command()
def experiment(
    name: Annotated[str | None, typer.Argument(help="Its name; without one, all are listed.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Single-threaded processes at a time; one a core without.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for record, table and figure.")] = Path("docs/experiments"),
) -> None:
    """Run an experiment and write its record, table and figure. Ctrl-C saves; the same command goes on.

    Examples:

        openk3 experiment
        openk3 experiment k3_vs_k2like --jobs 4
    """
    from openk3.evals.experiments import load, questions
    from openk3.evals.experiments.base import conduct, cores

    if name is None:
        for known, question in questions():
            print(f"{known:22} {question}")
        return
    for path in conduct(load(name), cores() if jobs is None else jobs, out):
        print(path)


bench = typer.Typer(no_args_is_help=True, help="How fast things are, beside their peers and the machine's own rate.")
app.add_typer(bench, name="bench")


@bench.command("train")
def bench_train(
    size: Annotated[str, typer.Option(help="A recipe: its model and optimizer are measured.")] = "nano",
    tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 4096,
    context: Annotated[int, typer.Option(help="Tokens of a sequence; they must fill the step.")] = 1024,
    steps: Annotated[int, typer.Option(help="Counted steps, of which the median is taken.")] = 9,
    compile: Annotated[bool, typer.Option(help="Also race both under torch.compile.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the record here, as JSON.")] = None,
) -> None:
    """Race a training step of K3 against a plain Transformer of as many active parameters, and profile both.

    Examples:

        openk3 bench train
        openk3 bench train --size pico --tokens 2048 --context 256 --no-compile
        openk3 bench train --out benchmarks/results/cpu/train.json
    """
    from openk3.evals.bench.train import run

    run(size, tokens=tokens, context=context, steps=steps, compile_too=compile, out=out)


def main() -> None:
    """Entry point: one sentence and exit code 2 for wrong input, 1 for a failure."""
    threading.excepthook = quiet_writer
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        print(f"openk3: {one_sentence(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, WRONG_INPUT) else 1)


def quiet_writer(args: threading.ExceptHookArgs) -> None:
    """No traceback of a helper thread that could not write: TensorBoard's raises it in the main thread again."""
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)


def one_sentence(error: Exception) -> str:
    """What to tell about an error."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, UserError | Failure | ValueError | OSError):
        return message
    if isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message:
        return f"there is not enough memory ({message[:200]}); try a smaller model or batch, or fewer tokens"
    return f"internal error, {type(error).__name__}: {message} (`openk3 --debug ...` shows where)"


if __name__ == "__main__":
    main()
