"""The training loop: `train(recipe, folder)`.

A step: the loader's next batch in micro-batches, forward and backward; clip the gradient; one update at the scheduled
rate; QK-clip; move the router biases. Everything a step depends on is in a checkpoint, so the same recipe and seed
give the same losses bit for bit, resumed or not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openk3 import disk
from openk3.data.loader import micro_batches
from openk3.errors import Failure
from openk3.train import folder as names
from openk3.train.curriculum import context_at
from openk3.train.display import Display, interrupts
from openk3.train.evaluate import Score, evaluate, nats, on_device, samples, score
from openk3.train.nonfinite import first_non_finite
from openk3.train.prepare import Run, start
from openk3.train.probe import probe
from openk3.train.recipe import Recipe
from openk3.train.schedule import learning_rate
from openk3.train.state import checkpoints

Watch = Callable[[Run], Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Summary:
    """Where a run stands when `train` returns."""

    folder: Path
    step: int
    steps: int
    tokens: int
    seconds: float
    held_out: Score | None  # of the last step's evaluation
    interrupted: bool

    @property
    def finished(self) -> bool:
        return self.step == self.steps


def train(recipe: Recipe, folder: Path, progress: bool = True, watch: Watch | None = None) -> Summary:
    """Train in a run folder until the budget is spent or Ctrl-C; go on from its last checkpoint if it has one.

    `watch(run)` is called before the first step and returns what is called after each one: a function without
    arguments whose dict joins the step's "train" line. It must leave the numbers of the run alone.
    Raises UserError for a folder that is in use, of another recipe, or with a damaged checkpoint; Failure for a NaN
    or a full disk. Both leave the last checkpoint whole.
    """
    folder = Path(folder)
    with names.open_run(folder, recipe), disk.disk_full_is_failure(folder, lambda: full_advice(folder)):
        screen = Display(recipe.steps, progress)
        run = start(recipe, folder, screen.say, shown=progress)
        try:
            with interrupts(screen.say) as interrupted, screen.at(run.step):
                held_out = steps(run, screen, interrupted, watch(run) if watch else dict)
            if run.step < recipe.steps:
                screen.say(
                    f"stopped and saved at step {run.step} of {recipe.steps}; the same command goes on from there"
                )
        finally:
            run.metrics.close()
    return Summary(
        folder, run.step, recipe.steps, run.tokens, run.seconds, held_out, interrupted=run.step < recipe.steps
    )


def steps(run: Run, screen: Display, interrupted: Any, seen: Callable[[], dict[str, Any]] = dict) -> Score | None:
    """All remaining steps, with evaluations, samples and checkpoints when they are due."""
    recipe, held_out = run.recipe.train, None
    while run.step < run.recipe.steps and not interrupted():
        began = time.perf_counter()
        last = run.step + 1 == run.recipe.steps
        measured = last or (run.step + 1) % recipe.eval_every == 0
        line, update_norms = training_step(run, measure=measured)
        line |= seen()
        line["tok_per_s"] = recipe.batch_tokens / (time.perf_counter() - began)
        line["seconds"] = run.seconds + time.perf_counter() - began
        run.write("train", **line)
        screen.step(line)
        if measured:
            held_out = evaluation(run, update_norms, whole=last)
            screen.say(f"step {run.step}: held-out loss {held_out.loss:.4f}, {held_out.bpb:.4f} bits per byte")
        run.seconds += time.perf_counter() - began
        if run.step % recipe.save_every == 0:
            run.save()
    run.save()  # which is nothing to do where this step has just been saved
    return held_out


def training_step(run: Run, *, measure: bool = False) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One step. Returns the fields of its "train" line, and the update norms by head if asked to measure."""
    recipe, model = run.recipe, run.model
    settings = {"peak": recipe.optim.lr, "warmup": recipe.optim.warmup, "min_ratio": recipe.optim.lr_min_ratio}
    lr = learning_rate(run.step, recipe.steps, **settings)
    context = set_stage(run)
    batch = run.loader.next()
    parts = [on_device(part, run.device) for part in micro_batches(batch, recipe.train.micro_tokens)]
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    run.optimizer.zero_grad()
    for part in parts:
        loss = nats(model, part)
        (loss / len(batch.targets_T)).backward()
        run.clip.collect()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip or torch.inf)
    total_nats, grad_norm = torch.stack([total, norm.double()]).tolist()  # one wait for the device
    if not (torch.isfinite(total) and torch.isfinite(norm)):
        where = first_non_finite(model, parts)
        raise Failure(
            f"step {run.step + 1}: {where} is not finite; nothing was saved, the last checkpoint is "
            f"{standing(run.folder)}; try a lower optim.lr"
        )
    update_norms = run.optimizer.step(lr, measure=measure)
    clipped = run.clip.step()
    loads = run.balancer.step()
    run.step, run.tokens = run.step + 1, run.tokens + len(batch.targets_T)
    loss, bpb, _ = score(total_nats, len(batch.targets_T), batch.n_bytes)
    line = {"loss": loss, "bpb": bpb, "lr": lr, "grad_norm": grad_norm, "clipped_heads": clipped, "context": context}
    return line | {"maxvio": loads.max_violation, "dead": loads.dead, "q": loads.q}, update_norms


def set_stage(run: Run) -> int:
    """Let the loader cut and mix as this step's stage says. Returns the context."""
    data, steps = run.recipe.data, run.recipe.steps
    run.loader.context = context_at(run.step, data.context, steps)
    if data.long_share and run.step >= round(data.long_from * steps):
        run.loader.start_mix()
    return run.loader.context


def evaluation(run: Run, update_norms: dict[str, torch.Tensor], *, whole: bool) -> Score:
    """Held-out score, probe and samples of this step, written down."""
    recipe = run.recipe.train
    limit = None if whole or not recipe.eval_tokens else recipe.eval_tokens
    held_out = evaluate(run.model, run.held_out(limit))
    if not math.isfinite(held_out.loss):
        parts = (on_device(part, run.device) for part in run.held_out(limit))
        where = first_non_finite(run.model, parts)
        raise Failure(
            f"step {run.step}, on held-out text: {where} is not finite; nothing was saved, the last checkpoint is "
            f"{standing(run.folder)}; try a lower optim.lr"
        )
    run.write("eval", loss=held_out.loss, bpb=held_out.bpb, held_out_tokens=held_out.tokens)
    run.write("probe", **probe(run.model, next(run.held_out(recipe.micro_tokens)), update_norms))
    drawn = samples(
        run.model, run.corpus.tokenizer, recipe.sample_prompts, length=recipe.sample_tokens, seed=recipe.seed
    )
    for sample in drawn:
        run.write("sample", **sample)
    (run.folder / names.SAMPLES).mkdir(exist_ok=True)
    text = json.dumps({"step": run.step, "tokens": run.tokens, "samples": drawn}, indent=1, ensure_ascii=False)
    disk.write_file(run.folder / names.SAMPLES / f"step-{run.step:08d}.json", text + "\n")
    return held_out


def standing(folder: Path) -> str:
    """The newest checkpoint in words."""
    return next((found.name for found in reversed(checkpoints(folder))), "none")


def full_advice(folder: Path) -> str:
    return f"the last checkpoint is {standing(folder)}; free some space and run the same command again"
