"""`openk3 bench train`: K3 beside a plain Transformer, whole training steps in one process.

Both have the same vocabulary, layers, active parameters and batch: whole sequences of one context, no padding. A step
is forward, backward, clipping, the optimizer and, for K3, QK-clip and the router's biases. The contenders take turns,
so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from openk3 import disk
from openk3.data.loader import Batch
from openk3.evals.bench.flops import StepFlops, k3_step, muon_flops, plain_step
from openk3.evals.bench.groups import by_group, named
from openk3.evals.bench.peer import Attend, PlainTransformer, blocked, fused, plain_transformer
from openk3.evals.experiments.base import cpu_name, dumps, today, versions
from openk3.model.audit import audit
from openk3.model.k3 import K3
from openk3.ops.cross_entropy import linear_cross_entropy
from openk3.train.balance import Balancer
from openk3.train.heap import keep_freed_memory
from openk3.train.muon import Bucket, buckets
from openk3.train.optim import Optimizer
from openk3.train.parameters import part
from openk3.train.qkclip import QKClip
from openk3.train.recipe import Recipe, load_recipe

SEED = 0
WARM_UP = 3
WIDE = 64  # fewer and wider heads have fewer scores: what else the peer is faster with
PRODUCT = 1024  # width of the square product that measures the machine's rate


@dataclass
class Contender:
    """One line of the table. `step` does a whole training step and returns the mean loss before it."""

    name: str
    optimizer: str
    model: K3 | PlainTransformer
    step: Callable[[], float]
    active: int
    flops: StepFlops


@dataclass
class Setting:
    """What all contenders share."""

    size: str
    recipe: Recipe
    batch: Batch
    tokens: int
    context: int


def token_ids(vocabulary: int, count: int) -> Tensor:
    """Ids whose frequency falls as 1 / rank, as it does in text: a pure function of its arguments."""
    chance = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    return torch.multinomial(chance, count, replacement=True, generator=torch.Generator().manual_seed(SEED))


def setting(size: str, tokens: int, context: int) -> Setting:
    """Raises ValueError if whole sequences of `context` do not fill `tokens`, or there is no such recipe."""
    if not 0 < context <= tokens or tokens % context:
        raise ValueError(f"--tokens {tokens} is not a whole number of sequences of --context {context}")
    recipe = load_recipe(size)
    ids = token_ids(recipe.model.vocab_size, tokens + 1)
    cu_seqlens = torch.arange(0, tokens + 1, context, dtype=torch.int32)
    return Setting(size, recipe, Batch(ids[:-1], ids[1:], cu_seqlens, tokens), tokens, context)


head_loss = named("head, loss", linear_cross_entropy)


def k3_loss(model: K3, s: Setting) -> Tensor:
    """Mean cross-entropy, a chunk of logits at a time: for both the faster way."""
    h_TD = model.hidden(s.batch.tokens_T, s.batch.cu_seqlens)
    return head_loss(h_TD, model.lm_head.weight, s.batch.targets_T) / s.tokens


def plain_loss(model: PlainTransformer, s: Setting) -> Tensor:
    h_TD = model(s.batch.tokens_T.view(-1, s.context))
    return head_loss(h_TD, model.lm_head.weight, s.batch.targets_T) / s.tokens


def k3_contender(s: Setting, compiled: bool = False) -> Contender:
    """K3 as `openk3 train` trains it."""
    model = K3.initialised(s.recipe.model, SEED).train()
    optimizer = Optimizer(model, s.recipe.model, s.recipe.optim)
    balancer, clip = Balancer(model, s.recipe.balance), QKClip(model, s.recipe.optim.qk_clip_tau)
    loss_of = torch.compile(k3_loss) if compiled else k3_loss

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.recipe.optim.clip or torch.inf)
        optimizer.step(s.recipe.optim.lr)

    def balance() -> None:
        clip.step()
        balancer.step()

    optimise, rebalance = named("optimizer", update), named("router, balance", balance)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, s)
        loss.backward()
        clip.collect()
        optimise()
        rebalance()
        return loss.item()

    flops = k3_step(model, s.tokens, s.context, muon_flops(optimizer.buckets))
    name = s.size + (", compiled" if compiled else "")
    return Contender(name, "Muon", model, step, audit(s.recipe.model).active, flops)


class PlainMuon:
    """Muon for the peer's matrices, each as a whole, and fused AdamW for the rest, as K3's optimizer divides them."""

    def __init__(self, model: PlainTransformer, lr: float, weight_decay: float):
        matrices = {name: p for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2}
        rest = [p for name, p in model.named_parameters() if name not in matrices]
        parts = [part(name, p.shape, 1) for name, p in matrices.items()]
        self.buckets: list[Bucket] = buckets(parts, matrices, weight_decay)
        self.lr, self.matrices = lr, matrices
        self.adamw = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95), fused=True)

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for p in self.matrices.values():
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for bucket in self.buckets:
            bucket.step(self.lr)


def plain_contender(
    s: Setting, optimizer: str, *, attend: Attend = fused, wide: bool = False, compiled: bool = False
) -> Contender:
    """The peer under AdamW or Muon; with `wide`, heads of 64 instead of as many as K3 has."""
    active = audit(s.recipe.model).active
    heads = max(1, s.recipe.model.hidden_size // WIDE) if wide else 0
    model = plain_transformer(s.recipe.model, active, s.context, SEED, attend, heads)
    o, clip = s.recipe.optim, s.recipe.optim.clip or torch.inf
    if optimizer == "Muon":
        update = PlainMuon(model, o.lr, o.weight_decay)
        products = muon_flops(update.buckets)
    else:
        settings = {"lr": o.lr, "weight_decay": o.weight_decay, "betas": (0.9, 0.95)}
        update, products = torch.optim.AdamW(model.parameters(), fused=True, **settings), 0
    loss_of = torch.compile(plain_loss) if compiled else plain_loss

    def optimise() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        update.step()

    marked = named("optimizer", optimise)

    def step() -> float:
        update.zero_grad()
        loss = loss_of(model, s)
        loss.backward()
        marked()
        return loss.item()

    modes = {f"{WIDE}-wide": wide, "blocked": attend is blocked, "compiled": compiled}
    name = ", ".join(["plain", *(mode for mode, on in modes.items() if on)])
    found = sum(p.numel() for p in model.parameters()) - model.embed_tokens.weight.numel()
    return Contender(name, optimizer, model, step, found, plain_step(model, s.tokens, s.context, products))


def contenders(s: Setting, compile_too: bool) -> list[Contender]:
    """K3 first, then the peer in every mode that could be its fastest."""
    found = [
        k3_contender(s),
        plain_contender(s, "AdamW"),
        plain_contender(s, "Muon"),
        plain_contender(s, "AdamW", attend=blocked),
        plain_contender(s, "AdamW", wide=True),
    ]
    if compile_too:
        found += [
            k3_contender(s, compiled=True),
            plain_contender(s, "AdamW", compiled=True),
            plain_contender(s, "AdamW", wide=True, compiled=True),
        ]
    return found


def product_rate(rounds: int = 10) -> float:
    """Operations a second of a large square product, the fastest of a few."""
    a, out = torch.randn(PRODUCT, PRODUCT), torch.empty(PRODUCT, PRODUCT)
    return 2 * PRODUCT**3 / min(seconds(lambda: torch.mm(a, a, out=out)) for _ in range(rounds))


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def race(
    field: list[Contender], steps: int, warm_up: int, advance: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, str], float]:
    """Seconds of every counted step by contender, why a contender failed, and the machine's rate, seen all along.

    Only a compiled contender may fail: what its compiler says is a result. Any other error is raised.
    """
    times: dict[str, list[float]] = {label(c): [] for c in field}
    failures: dict[str, str] = {}
    rate = product_rate()
    for i in range(warm_up + steps):
        for c in field[i % len(field) :] + field[: i % len(field)]:
            if label(c) in failures:
                continue
            try:
                took = seconds(c.step)
            except Exception as error:
                if "compiled" not in c.name:
                    raise
                failures[label(c)] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                continue
            if i >= warm_up:
                times[label(c)].append(took)
        rate = max(rate, product_rate(3))
        advance()
    return times, failures, rate


def label(c: Contender) -> str:
    return f"{c.name}, {c.optimizer}"


def row(c: Contender, s: Setting, times: list[float], failure: str | None, rate: float) -> dict[str, Any]:
    """What the record holds of one contender."""
    flops = c.flops
    fields: dict[str, Any] = {
        "name": c.name,
        "optimizer": c.optimizer,
        "active": c.active,
        "gflop": flops.total / 1e9,
        "gflop_by_part": {name: value / 1e9 for name, value in vars(flops).items()},
        "floor_ms": flops.total / rate * 1e3,
    }
    if failure is not None:
        return fields | {"failed": failure}
    median = statistics.median(times)
    return fields | {
        "ms": median * 1e3,
        "ms_of_steps": [t * 1e3 for t in times],
        "tokens_per_s": s.tokens / median,
        "over_floor": median * rate / flops.total,
    }


def measure(
    size: str = "nano", *, tokens: int = 4096, context: int = 1024, steps: int = 9, compile_too: bool = True,
    shown: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The record: setting, machine, rows, and a profile of K3 and of the peer, in milliseconds a step.

    Raises ValueError for a setting that cannot be, or fewer steps than one.
    """
    if steps < 1:
        raise ValueError(f"--steps {steps} must be at least 1")
    s = setting(size, tokens, context)
    keep_freed_memory()
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)  # why a graph breaks is no news here
    warnings.filterwarnings("ignore", module="torch._dynamo")
    field = contenders(s, compile_too)
    with Progress(disable=not shown, transient=True) as progress:
        task = progress.add_task("steps", total=WARM_UP + steps)
        times, failures, rate = race(field, steps, WARM_UP, lambda: progress.advance(task))
    rows = [row(c, s, times[label(c)], failures.get(label(c)), rate) for c in field]
    peers = [r for r in rows[1:] if "ms" in r and r["name"].startswith("plain")]
    fastest = max(peers, key=lambda r: r["tokens_per_s"])
    for r in rows:
        if "ms" in r:
            r["k3_over_this"] = rows[0]["tokens_per_s"] / r["tokens_per_s"]
    command = f"openk3 bench train --size {size} --tokens {tokens} --context {context} --steps {steps}"
    return {
        "command": command + ("" if compile_too else " --no-compile"),
        "date": today(),
        "versions": versions(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "setting": {"size": size, "tokens": tokens, "context": context, "steps": steps, "ids": "Zipf, seeded"},
        "product_gflops": rate / 1e9,
        "ratio_to_fastest_peer": fastest["k3_over_this"],
        "fastest_peer": f"{fastest['name']}, {fastest['optimizer']}",
        "rows": rows,
        "profile": {c.name: by_group(c.model, c.step, min(steps, 3)) for c in field[:2]},
    }


def show(record: dict[str, Any], console: Console) -> None:
    """The record as tables: the race, and where the time of K3 and of its peer goes."""
    s, rows = record["setting"], record["rows"]
    console.print(
        f"a training step of {s['tokens']:,} tokens at context {s['context']:,}: medians of {s['steps']} steps, "
        f"{record['threads']} threads\nlarge matrix product {record['product_gflops']:.0f} GFLOP/s; active parameters "
        f"{rows[0]['active']:,} and {rows[1]['active']:,}\nratio: tokens/s of {s['size']} over those of the line; x: "
        "times the floor, which is GFLOP at the rate of a large product, in ms",
        highlight=False,
    )
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("model, optimizer", no_wrap=True)
    for head in ("ms", "tokens/s", "ratio", "GFLOP", "floor", "x"):
        table.add_column(head, justify="right", no_wrap=True)
    for r in rows:
        cells = [f"{r['name']}, {r['optimizer']}"]
        if "ms" in r:
            cells += [f"{r['ms']:.0f}", f"{r['tokens_per_s']:,.0f}", f"{r['k3_over_this']:.2f}"]
        else:
            cells += ["failed", "", ""]
        cells += [f"{r['gflop']:.1f}", f"{r['floor_ms']:.0f}", f"{r['over_floor']:.2f}" if "ms" in r else ""]
        table.add_row(*cells)
    console.print(table)
    for r in rows:
        if "failed" in r:
            console.print(f"{r['name']} failed: {r['failed']}", markup=False)
    for name, groups in record["profile"].items():
        total = sum(groups.values())
        split = Table(box=box.SIMPLE, title=f"where the time of {name} goes, under the profiler", title_justify="left")
        split.add_column("group")
        split.add_column("ms a step", justify="right")
        split.add_column("share", justify="right")
        for group, ms in groups.items():
            split.add_row(group, f"{ms:.1f}", f"{ms / total:.1%}")
        console.print(split)


def run(size: str, *, tokens: int, context: int, steps: int, compile_too: bool, out: Path | None) -> None:
    """Measure, print, and write the record if asked. Raises ValueError as `measure` does."""
    record = measure(size, tokens=tokens, context=context, steps=steps, compile_too=compile_too)
    show(record, Console())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        disk.write_file(out, dumps(record))
        print(out)
