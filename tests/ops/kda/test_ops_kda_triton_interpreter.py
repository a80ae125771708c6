"""The Triton kernels in float32 under the interpreter, in a process of their own, against the recurrence in float64.

bf16 products are wrong in the interpreter, so the operand type of every kernel is an argument; see tests/gpu for bf16.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are written in triton, which exists for Linux only")

PROGRAM = """
import torch
import triton
import triton.language as tl
from openk3.ops.kda import BoundedGate, gpu, kda, kda_segment
from openk3.ops.kda.triton_backward import load_exact, store_exact

torch.manual_seed(0)
H, K = 1, 64

def close(got, want, limit=5e-6):
    error = ((got - want).norm() / want.norm()).item()
    assert error < limit, error

def check(lengths, offsets, segments, center):
    T, cu = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
    x = [torch.randn(T, H, K), torch.randn(T, H, K), torch.randn(T, H, K), torch.randn(T, H, K) * 2 + center]
    x += [torch.randn(T, H) + center / 2, torch.rand(H), torch.rand(H, K), torch.randn(len(lengths), H, K, K)]
    x = [y.requires_grad_() for y in x]
    wide = [y.detach().double().requires_grad_() for y in x]
    def run(op, x, **more):
        gate = BoundedGate(x[5], x[6])
        return op(*x[:5], cu_seqlens=cu, gate=gate, initial_state=x[7], state_offsets=offsets, **more)
    got, want = run(gpu.kda, x, segments=segments), run(kda, wide, backend="reference")
    for a, b in zip(got, want, strict=True):
        close(a, b)
    if segments:
        return
    weights = [torch.randn_like(a) for a in got]
    gradients = torch.autograd.grad(got, x, weights)
    for a, b in zip(gradients, torch.autograd.grad(want, wide, [w.double() for w in weights]), strict=True):
        close(a, b, 2e-5)

check([40, 0, 17], [20, 32, 57, 20], False, -4.0)
check([33], [33], False, 2.0)
gpu.launch.segment_rule = lambda H, V, K: (32, 3)
check([130, 0, 20], [100, 150], True, -5.0)

tokens = [torch.randn(6, H, K), torch.randn(6, H, K), torch.randn(6, H, K), torch.randn(6, H, K) - 4, torch.randn(6, H)]
gate, pool = BoundedGate(torch.rand(H), torch.rand(H, K)), torch.randn(4, H, K, K)
wide_gate, before, slots = BoundedGate(*(y.double() for y in gate[:2])), pool.clone(), [2, -1, 0]
o = gpu.kda_step(*tokens, state_SHKV=pool, slots_N=torch.tensor(slots), gate=gate)
for n, slot in enumerate(slots):
    rows = slice(2 * n, 2 * n + 2)
    if slot < 0:
        assert not o[rows].any()
        continue
    want, state = kda(
        *(y[rows].double() for y in tokens), cu_seqlens=torch.tensor([0, 2]), gate=wide_gate,
        initial_state=before[slot : slot + 1].double(), backend="reference",
    )
    close(o[rows], want)
    close(pool[slot], state[0])
assert torch.equal(pool[[1, 3]], before[[1, 3]])

cu = torch.tensor([0, 70, 70, 80], dtype=torch.int32)
k, v, z, beta = torch.randn(80, H, K), torch.randn(80, H, K), torch.randn(80, H, K) - 6, torch.randn(80, H) - 2
got = gpu.kda_segment(k, v, z, beta, cu_seqlens=cu, gate=gate)
want = kda_segment(*(y.double() for y in (k, v, z, beta)), cu_seqlens=cu, gate=wide_gate, backend="reference")
for a, b in zip(got, want, strict=True):
    close(a, b)
print("equal")
"""


def test_kernels_equal_the_recurrence():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
