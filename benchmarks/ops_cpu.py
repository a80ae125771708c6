"""How fast are the ops around KDA on the CPU, and how near to what they cannot avoid?

    python benchmarks/ops_cpu.py [--json FILE] [--rounds N] [--only NAME]

One process, float32, the shapes of the `nano` model: 8192 tokens in sequences of up to 512. Every op runs forward, and
forward with backward, in its default backend and as its reference. The floor beside it is its own matrix products at
the rate of a large matrix product on this machine, plus one read of every input and gradient and one write of every
result at the speed of a copy, both measured in the same run. All calls take turns, so that they see the same machine;
minima, because others may be using it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openk3.ops.attnres import attnres
from openk3.ops.experts import experts
from openk3.ops.mla import mla_expanded
from openk3.ops.norm import gated_head_norm, rms_norm
from openk3.ops.routing import histogram, histogram_bias, route
from openk3.ops.shortconv import short_conv
from openk3.ops.situ import situ_glu

T, D, H, NOPE, ROPE, V, KV, CONV = 8192, 128, 4, 32, 16, 32, 32, 3 * 128
EXPERTS, K, LATENT, INNER, SOURCES = 24, 2, 64, 64, 4


@dataclass
class Case:
    """An op on drawn inputs: `call(backend)` gives its output; `products` are its forward's multiply-adds."""

    name: str
    inputs: list[Tensor]
    call: Callable[[str], Tensor]
    products: float = 0.0
    backward_products: float = 2.0  # matrix products of the backward, in forwards


def ragged(seed: int = 0) -> list[int]:
    """Lengths of documents cut at 512: half of the pieces are whole."""
    generator, lengths = torch.Generator().manual_seed(seed), []
    while (left := T - sum(lengths)) > 0:
        whole = torch.rand(1, generator=generator) < 0.5
        length = 512 if whole else int(torch.randint(1, 512, (1,), generator=generator))
        lengths.append(min(length, left))
    return lengths


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def mla_case(name: str, lengths: list[int]) -> Case:
    q, latent, k_pe, w = inputs = leaves((T, H, NOPE + ROPE), (T, KV), (T, ROPE), (H * (NOPE + V), KV))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    scale = (NOPE + ROPE) ** -0.5
    attention = sum(n * n / 2 for n in lengths) * H * (NOPE + ROPE + V)

    def call(backend: str) -> Tensor:
        return mla_expanded(q, latent, k_pe, w, nope=NOPE, cu_seqlens=cu, scale=scale, backend=backend)

    return Case(name, inputs, call, attention + T * KV * H * (NOPE + V), backward_products=2.4)


def cases() -> list[Case]:
    whole = torch.arange(0, T + 1, 512, dtype=torch.int32)
    x, weight = norm_in = leaves((T, D), (D,))
    o, o_weight, gate = head_in = leaves((T, H, V), (V,), (T, H, V))
    c, c_weight = conv_in = leaves((T, CONV), (CONV, 4))
    *sources, query, gamma = depth_in = leaves(*[(T, D)] * SOURCES, (D,), (D,))
    g, u = glu_in = leaves((T * K, INNER), (T * K, INNER))
    z, w1, w3, w2, weights = moe_in = leaves(
        (T, LATENT), (EXPERTS, INNER, LATENT), (EXPERTS, INNER, LATENT), (EXPERTS, LATENT, INNER), (T, K)
    )
    (logits,) = route_in = leaves((T, EXPERTS))
    bias = torch.zeros(EXPERTS)
    ids = route(logits, bias, K).ids_TK
    return [
        Case("rms_norm", norm_in, lambda b: rms_norm(x, weight, 1e-5, backend=b)),
        Case("gated_head_norm", head_in, lambda b: gated_head_norm(o, o_weight, gate, 1e-5, backend=b)),
        Case("short_conv", conv_in, lambda b: short_conv(c, c_weight, cu_seqlens=whole, backend=b)[0]),
        mla_case("mla, 16 x 512", [512] * 16),
        mla_case("mla, ragged", ragged()),
        mla_case("mla, 128 x 64", [64] * 128),
        Case(f"attnres, {SOURCES} sources", depth_in, lambda b: attnres(sources, query, gamma, backend=b)),
        Case("situ_glu", glu_in, lambda b: situ_glu(g, u, backend=b)),
        Case("route", route_in, lambda b: route(logits, bias, K).weights_TK),
        Case(
            "experts", moe_in, lambda b: experts(z, ids, weights, w1, w3, w2, backend=b), 3.0 * T * K * LATENT * INNER
        ),
    ]


def balance_step() -> Callable[[], Tensor]:
    bias = torch.zeros(EXPERTS)
    r = route(torch.randn(T, EXPERTS), bias, K)
    return lambda: histogram_bias(histogram(r.scores_TE, r.cutoff_T, bias), bias, K)


def forward(case: Case, backend: str) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return case.call(backend)

    return call


def both_ways(case: Case, backend: str) -> Callable[[], object]:
    d_out = torch.randn_like(case.call(backend))
    return lambda: torch.autograd.grad(case.call(backend), case.inputs, d_out)


def minima(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Least milliseconds of each call, the calls taking turns after one round to warm up."""
    best = [float("inf")] * len(calls)
    for i in range(rounds + 1):
        for j, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if i:
                best[j] = min(best[j], (time.perf_counter() - start) * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="ops whose name contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    a, source = torch.randn(1024, 1024), torch.randn(T, D * SOURCES)
    target, product = torch.empty_like(source), torch.empty_like(a)
    chosen = [case for case in cases() if options.only in case.name]
    calls = [lambda: torch.mm(a, a, out=product), lambda: target.copy_(source), balance_step()]
    for case in chosen:
        calls += [way(case, backend) for backend in ("auto", "reference") for way in (forward, both_ways)]
    product_ms, copy_ms, balance_ms, *times = minima(calls, options.rounds)
    rate, speed = 1024**3 / product_ms, 2 * source.nbytes / copy_ms
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, minima of {options.rounds}; float32, {T} tokens")
    print(f"large matrix product {2e-6 * rate:.0f} GFLOP/s, copy {1e-6 * speed:.0f} GB/s")
    print(f"{'op':<20} {'forward ms':>10} {'both ms':>8} {'floor':>6} {'ratio':>6} {'reference ms':>13} {'both':>7}")
    rows = []
    for i, case in enumerate(chosen):
        ms, both, ref_ms, ref_both = times[4 * i : 4 * i + 4]
        nbytes = 2 * (sum(t.nbytes for t in case.inputs) + case.call("auto").nbytes)  # values, then gradients
        nbytes += sum(t.nbytes for t in case.inputs)  # the backward reads the inputs again
        floor = case.products * (1 + case.backward_products) / rate + nbytes / speed
        rows.append({"op": case.name, "ms": ms, "both_ms": both, "floor_ms": floor, "reference_both_ms": ref_both})
        print(
            f"{case.name:<20} {ms:>10.2f} {both:>8.2f} {floor:>6.2f} {both / floor:>6.1f} "
            f"{ref_ms:>13.2f} {ref_both:>7.2f}"
        )
    print(f"{'balance step':<20} {balance_ms:>10.2f}   (histogram and its solution, no gradient)")
    if options.json:
        record = {"torch": torch.__version__, "threads": threads, "gflops": 2e-6 * rate, "gbs": 1e-6 * speed}
        options.json.write_text(json.dumps(record | {"balance_ms": balance_ms, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
