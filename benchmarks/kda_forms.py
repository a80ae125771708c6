"""The three forms of KDA on the CPU: token by token, in chunks, and one step from a stored state.

    python benchmarks/kda_forms.py [--json FILE] [--rounds N] [--threads N]

Forward only, float32, random data, 4 heads of width 64. The recurrence and the chunks take whole texts of several
lengths; the step takes one token behind texts of the same lengths, from the state they left. All alternate in one
process; the shortest of the rounds counts, because whatever else the machine does can only add.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from openk3.ops.kda import BoundedGate, kda, kda_step

HEADS, WIDTH = 4, 64
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def calls(T: int) -> dict[str, Callable[[], object]]:
    """The forms on one text of T tokens."""
    q, k, v, z = (torch.randn(T, HEADS, WIDTH) for _ in range(4))
    beta, gate = torch.randn(T, HEADS), BoundedGate(torch.zeros(HEADS), torch.full((HEADS, WIDTH), -4.0))
    cu_seqlens = torch.tensor([0, T], dtype=torch.int32)
    _, state_SHKV = kda(q, k, v, z, beta, cu_seqlens=cu_seqlens, gate=gate)
    last, slots_N = tuple(x[-1:] for x in (q, k, v, z, beta)), torch.tensor([0])
    return {
        "recurrence": lambda: kda(q, k, v, z, beta, cu_seqlens=cu_seqlens, gate=gate, backend="reference"),
        "chunks": lambda: kda(q, k, v, z, beta, cu_seqlens=cu_seqlens, gate=gate, backend="torch"),
        "step": lambda: kda_step(*last, state_SHKV=state_SHKV, slots_N=slots_N, gate=gate),
    }


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


@torch.no_grad()
def measure(rounds: int) -> list[dict]:
    by_length = {T: calls(T) for T in LENGTHS}
    best = {(T, name): float("inf") for T, forms in by_length.items() for name in forms}
    for _ in range(rounds + 1):  # the first one warms up as well as it counts
        for T, forms in by_length.items():
            for name, call in forms.items():
                best[T, name] = min(best[T, name], milliseconds(call))
    return [{"T": T} | {f"{name}_ms": best[T, name] for name in forms} for T, forms in by_length.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    rows = measure(options.rounds)
    for row in rows:
        print("  ".join(f"{name} {value:10.3f}" for name, value in row.items()))
    record = {
        "command": f"python benchmarks/kda_forms.py --rounds {options.rounds} --threads {options.threads}",
        "machine": f"{platform.machine()}, {options.threads} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "heads": HEADS,
        "width": WIDTH,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
