"""KDA on one GPU: our kernels, and fla's where it is installed, on two gate sets (kernels.md sections 12 and 16).

    python benchmarks/kda_gpu.py [--out benchmarks/results/h200/kda.json]

Median of CUDA events; "graph" rows replay a captured graph. Decode is the recurrence alone (no convolution, no output
norm), one graph over distinct states, divided by their number. A non-zero initial state goes in, the final state comes
out. The floor is the bytes of tokens and states over a copy bandwidth of 4.3 TB/s. The error is RMS(difference) /
RMS(reference) of the output against float64, over the first two heads (they do not see each other).
"""

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openk3.ops.kda import BoundedGate, gpu, kda

K = 128
BANDWIDTH = 4.3e12
STATE_BYTES = 2 * K * K * 4  # read and written, float32
TOKEN_BYTES = 5 * K * 2 + 2  # q, k, v, g, o and beta of a token and head
BACKWARD_BYTES = 9 * K * 2  # q, k, v, g, do in, their four gradients out
FORWARD = [(1, 8192, 96), (8, 1024, 96), (1, 8192, 12), (1, 65536, 12), (8, 8192, 96)]
BACKWARD = [(1, 8192, 96), (1, 8192, 12)]
DECODE = [(1, 96), (32, 96), (256, 96)]


def draw(B: int, T: int, H: int, gates: str) -> tuple:
    """Tokens [B T, H, K] in bf16, A_log, dt_bias, initial states [B, H, K, K]; the gate sets of kernels.md 12.2."""
    torch.manual_seed(0)
    n, u = (lambda *s: torch.randn(*s, device="cuda")), (lambda *s: torch.rand(*s, device="cuda"))
    z, A_log, dt_bias = n(B * T, H, K), u(H), u(H, K)
    if gates == "slow":
        z, A_log, dt_bias = u(B * T, H, K) * 4 - 12, torch.zeros_like(A_log), torch.zeros_like(dt_bias)
    q, k, v = (n(B * T, H, K).bfloat16() for _ in range(3))
    return q, k, v, z.bfloat16(), n(B * T, H).bfloat16(), A_log, dt_bias, n(B, H, K, K)


def ours(x: tuple, cu: torch.Tensor) -> tuple:
    return gpu.kda(*x[:5], cu_seqlens=cu, gate=BoundedGate(x[5], x[6]), initial_state=x[7])


def fla_chunk(x: tuple, cu: torch.Tensor) -> tuple:
    from fla.ops.kda import chunk_kda

    q, k, v, z, beta = (y[None] for y in x[:5])
    o, final = chunk_kda(
        q,
        k,
        v,
        z,
        beta,
        scale=K**-0.5,
        initial_state=x[7],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
        A_log=x[5],
        dt_bias=x[6].reshape(-1),
        cu_seqlens=cu.long() if len(cu) > 2 else None,
    )
    return o[0], final


def backends() -> dict[str, Callable]:
    found = {"openk3-triton": ours}
    try:
        importlib.import_module("fla.ops.kda")  # it may be there and still not import with this triton
        found["fla"] = fla_chunk
    except ImportError:
        print("fla is not installed: ours alone")
    return found


def median_ms(call: Callable, repeats: int) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[repeats // 2]


def captured(call: Callable) -> Callable:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def error_of(call: Callable, x: tuple, cu: torch.Tensor) -> float:
    """Of the output, over the first two heads and at most 8,192 tokens of whole sequences."""
    cu = cu[cu <= 8192] if int(cu[1]) <= 8192 else torch.tensor([0, int(cu[1])], device="cuda", dtype=torch.int32)
    T, N = int(cu[-1]), len(cu) - 1
    part = (*(y[:T, :2].contiguous() for y in x[:5]), x[5][:2], x[6][:2].contiguous(), x[7][:N, :2].contiguous())
    wide = [y.double() for y in part]
    want = kda(*wide[:5], cu_seqlens=cu, gate=BoundedGate(*wide[5:7]), initial_state=wide[7], backend="torch")[0]
    return ((call(part, cu)[0].double() - want).norm() / want.norm()).item()


def row(
    what: str, B: int, T: int, H: int, gates: str, name: str, ms: float, floor: float, error: float | None, graph: bool
) -> dict:
    print(
        f"{what:17} {B:3} {T:6} {H:3} {gates:7}{name:15}{'graph' if graph else 'eager'} {ms:9.4f} ms "
        f"{ms / floor:6.1f} x floor" + ("" if error is None else f"   error {error:.4f}"),
        flush=True,
    )
    return {
        "what": what,
        "B": B,
        "T": T,
        "H": H,
        "gate": gates,
        "backend": name,
        "ms": round(ms, 5),
        "floor_ms": round(floor, 5),
        "error": error,
        "graph": graph,
    }


def forward_rows(found: dict[str, Callable]) -> list[dict]:
    rows = []
    for B, T, H in FORWARD:
        floor = (B * T * H * TOKEN_BYTES + B * H * STATE_BYTES) / BANDWIDTH * 1e3
        cu = torch.arange(B + 1, device="cuda", dtype=torch.int32) * T
        for gates in ("strong", "slow"):
            x = draw(B, T, H, gates)
            for name, call in found.items():
                error = error_of(call, x, cu)
                once = partial(call, x, cu)
                with torch.no_grad():
                    rows.append(row("forward", B, T, H, gates, name, median_ms(once, 30), floor, error, False))
                    if name.startswith("openk3"):
                        ms = median_ms(captured(once), 50)
                        rows.append(row("forward", B, T, H, gates, name, ms, floor, error, True))
    return rows


def both_ways(call: Callable, x: list, cu: torch.Tensor, weights: tuple) -> None:
    torch.autograd.grad(call(x, cu), x, weights)


def backward_rows(found: dict[str, Callable]) -> list[dict]:
    rows = []
    for B, T, H in BACKWARD:
        floor = (B * T * H * (TOKEN_BYTES + BACKWARD_BYTES) + 2 * B * H * STATE_BYTES) / BANDWIDTH * 1e3
        cu = torch.arange(B + 1, device="cuda", dtype=torch.int32) * T
        for gates in ("strong", "slow"):
            x = [y.requires_grad_() for y in draw(B, T, H, gates)]
            weights = torch.randn_like(x[2]), torch.randn_like(x[7])
            for name, call in found.items():
                ms = median_ms(partial(both_ways, call, x, cu, weights), 20)
                rows.append(row("forward+backward", B, T, H, gates, name, ms, floor, None, False))
    return rows


def step_all(x: tuple, pools: list, slots: torch.Tensor) -> None:
    for pool in pools:
        gpu.kda_step(*x[:5], state_SHKV=pool, slots_N=slots, gate=BoundedGate(x[5], x[6]))


def decode_rows() -> list[dict]:
    rows = []
    for N, H in DECODE:
        count = 69 if N <= 32 else 16
        pools, slots = [torch.randn(N, H, K, K, device="cuda") for _ in range(count)], torch.arange(N, device="cuda")
        floor = N * H * (STATE_BYTES + TOKEN_BYTES) / BANDWIDTH * 1e3
        for gates in ("strong", "slow"):
            ms = median_ms(captured(partial(step_all, draw(1, N, H, gates), pools, slots)), 30) / count
            rows.append(row("decode", N, 1, H, gates, "openk3-triton", ms, floor, None, True))
        pools.clear()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found = backends()
    record = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "versions": {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__},
        "rows": [],
    }
    for rows in (decode_rows, partial(forward_rows, found), partial(backward_rows, found)):
        record["rows"] += rows()
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
