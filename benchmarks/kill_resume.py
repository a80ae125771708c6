"""Kill a training run again and again, and prove that it ends as if nothing had happened.

    python benchmarks/kill_resume.py [--kills 20] [--seed 0] [--out FILE]

Trains a small run without a break. Then trains the same recipe in another folder, sending SIGKILL to the process at
random moments, in a step, an evaluation or the writing of a checkpoint, and starting it again, until all kills are
spent and the run ends by itself. Every loss, held-out score and weight must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from openk3.train.loop import train
from openk3.train.metrics import TIMING
from openk3.train.recipe import Recipe, load_recipe, parse_recipe
from openk3.train.state import latest

STEPS = 90


def recipe_of(folder: Path) -> Recipe:
    """A pico run of 90 short steps on a toy text, saving every third step."""
    rng = random.Random(0)
    words = ["".join(rng.choices("bcdfglmnprst aeiou", k=rng.randint(2, 7))).replace(" ", "a") for _ in range(200)]
    (folder / "text").mkdir()
    for i in range(12):
        lines = [" ".join(rng.choices(words, k=8)) for _ in range(80)]
        (folder / "text" / f"{i:02d}.txt").write_text("\n".join(lines))
    overrides = [f"data.source={folder}/text/*.txt", "data.context=64", f"train.steps={STEPS}", "train.save_every=3"]
    overrides += ["train.batch_tokens=256", "train.micro_tokens=128", "train.eval_every=10", "train.eval_tokens=256"]
    return load_recipe("pico", [*overrides, "train.sample_tokens=8"])


def losses(run: Path) -> list[dict]:
    """All lines of the metrics, timing left out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in lines]


def work(recipe: str, run: Path) -> None:
    sys.modules["tensorboard"] = None  # saves its seconds of import at every restart
    train(parse_recipe(recipe), run, progress=False)


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind": "train"') if metrics.exists() else 0


def kill_and_resume(recipe: Recipe, run: Path, kills: int, seed: int) -> list[dict]:
    """Run to the end through so many kills. Returns what each one met."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openk3.train.loop"])
    rng, met = random.Random(seed), []
    while True:
        process = context.Process(target=work, args=(recipe.to_toml(), run))
        process.start()
        before = steps_done(run)
        left = kills - len(met)
        # Wait until the process trains, then for a random part of the steps that each kill may use up.
        goal = before + rng.randint(0, max(1, (STEPS - before) // (left + 1)))
        while left and process.is_alive() and steps_done(run) <= goal:
            time.sleep(0.002)
        if not left or not process.is_alive():
            process.join()
            break
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            break
        half = [f.name for f in (run / "checkpoints").glob(".*")] if (run / "checkpoints").is_dir() else []
        whole = latest(run)
        met.append({"steps": steps_done(run), "newest": whole.name if whole else None, "half_written": half})
    if process.exitcode != 0:
        raise SystemExit(f"the run ended with exit code {process.exitcode}")
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the record as JSON")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="openk3-kill-"))
    try:
        recipe = recipe_of(folder)
        began = time.time()
        train(recipe, folder / "unbroken", progress=False)
        unbroken_s = time.time() - began
        met = kill_and_resume(recipe, folder / "killed", args.kills, args.seed)
        expected, got = losses(folder / "unbroken"), losses(folder / "killed")
        newest = [latest(folder / name) for name in ("unbroken", "killed")]
        tensors = [(found / "state" / "tensors.safetensors").read_bytes() for found in newest if found]
        for i, kill in enumerate(met, 1):
            half = ", ".join(kill["half_written"])
            print(f"kill {i:2d}: {kill['steps']:2d} steps logged, newest checkpoint {kill['newest']} {half}")
        record = {
            "kills": len(met),
            "while_writing_a_checkpoint": sum(bool(kill["half_written"]) for kill in met),
            "steps": STEPS,
            "metrics_lines": len(expected),
            "metrics_equal": expected == got,
            "weights_and_state_equal": tensors[0] == tensors[-1],
            "unbroken_seconds": round(unbroken_s, 1),
            "machine": f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record | {"met": met}, indent=1) + "\n")
    sys.exit(0 if record["metrics_equal"] and record["weights_and_state_equal"] and len(met) == args.kills else 1)


if __name__ == "__main__":
    main()
