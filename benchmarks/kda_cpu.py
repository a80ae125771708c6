"""How fast is chunked KDA on the CPU, and how much of that is its matrix products?

    python benchmarks/kda_cpu.py [--json FILE] [--quick] [--threads N]

Everything runs in one process on random data, float32, forward and backward, in both gate regimes: "strong" (a state
is forgotten within a few tokens) and "slow" (half-life about 1,700 tokens). The floor is what the call cannot avoid:
its own matrix products, recorded while it runs (same shapes, strides and number, forward and backward) and replayed
alone. Calls and floors alternate, so that both see the same machine. Medians.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openk3.ops.kda import BoundedGate, kda

# The products of PyTorch and the position of their first factor.
PRODUCTS = {"bmm": 0, "baddbmm": 1, "baddbmm_": 1, "mm": 0, "addmm": 1}


class Recorder(TorchDispatchMode):
    """Notes every matrix product that runs under it, with shapes and strides."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[tuple, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            first = PRODUCTS[name]
            self.seen.append(tuple((tuple(x.shape), x.stride()) for x in args[first : first + 2]))
        return func(*args, **(kwargs or {}))


def like(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Random numbers in the given layout."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.randn(size).as_strided(shape, stride)


def products_alone(call: Callable[[], object]) -> tuple[Callable[[], None], float]:
    """A function that runs only the matrix products of `call`, and their floating-point operations."""
    with Recorder() as recorder:
        call()
    pairs = [(like(*a), like(*b)) for a, b in recorder.seen]
    outs = [torch.empty(*a.shape[:-1], b.shape[-1]) for a, b in pairs]
    flops = sum(2.0 * a.numel() * b.shape[-1] for a, b in pairs)

    def replay() -> None:
        for (a, b), out in zip(pairs, outs, strict=True):
            torch.matmul(a, b, out=out)

    return replay, flops


def medians(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds of each call, the calls taking turns."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seen in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seen.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(seen) for seen in times]


def training_call(T: int, sequences: int, H: int, width: int, regime: str) -> Callable[[], object]:
    """Forward and backward with gradients of every input."""
    q, k, v = (torch.randn(T, H, width) for _ in range(3))
    beta, do = torch.randn(T, H), torch.randn(T, H, width)
    if regime == "strong":
        z, A_log, dt_bias = torch.randn(T, H, width), torch.rand(H), torch.rand(H, width)
    else:
        z, A_log, dt_bias = torch.rand(T, H, width) * 4 - 12, torch.zeros(H), torch.zeros(H, width)
    inputs = [x.requires_grad_() for x in (q, k, v, z, beta, A_log, dt_bias)]
    cu_seqlens = torch.arange(0, T + 1, T // sequences, dtype=torch.int32)

    def call() -> object:
        o, _ = kda(q, k, v, z, beta, cu_seqlens=cu_seqlens, gate=BoundedGate(A_log, dt_bias))
        return torch.autograd.grad(o, inputs, do)

    return call


def measure(T: int, sequences: int, H: int, width: int, regime: str, rounds: int) -> dict:
    call = training_call(T, sequences, H, width, regime)
    alone, flops = products_alone(call)
    ms, floor = medians([call, alone], rounds)
    return {
        "T": T,
        "sequences": sequences,
        "H": H,
        "width": width,
        "regime": regime,
        "ms": ms,
        "products_ms": floor,
        "ratio": ms / floor,
        "gflop": flops / 1e9,
        "tokens_per_s": T / ms * 1e3,
    }


def slope(rows: list[dict]) -> float:
    """Least-squares slope of log time over log T."""
    x, y = [math.log(r["T"]) for r in rows], [math.log(r["ms"]) for r in rows]
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--threads", type=int, help="CPU threads; all cores if not given")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rounds = 5 if options.quick else 25
    torch.manual_seed(0)
    record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rounds": rounds, "rows": []}
    print(f"torch {record['torch']}, {record['threads']} threads, medians of {rounds}; float32, forward + backward")
    print(f"{'T':>6} {'seq':>4} {'H':>3} {'K=V':>4} {'gate':>7} {'ms':>8} {'products':>9} {'ratio':>6} {'GFLOP':>6}")
    for regime in ("strong", "slow"):
        shapes = [(1024, 1, 4, 64), (2048, 1, 4, 64), (4096, 1, 4, 64), (8192, 1, 4, 64), (8192, 16, 4, 32)]
        rows = []
        for shape in shapes:
            r = measure(*shape, regime, rounds)
            rows.append(r)
            print(
                f"{r['T']:>6} {r['sequences']:>4} {r['H']:>3} {r['width']:>4} {regime:>7} {r['ms']:>8.1f} "
                f"{r['products_ms']:>9.1f} {r['ratio']:>6.2f} {r['gflop']:>6.2f}",
                flush=True,
            )
        power = slope([r for r in rows if r["sequences"] == 1])
        print(f"{regime}: time grows as T^{power:.2f}")
        record["rows"] += rows
        record[f"slope_{regime}"] = power
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
