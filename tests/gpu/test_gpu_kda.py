"""The Triton kernels of KDA on a GPU against float64 (kernels.md section 9). Skipped where there is no CUDA device.

The reference is the chunk form in float64, itself proved equal to the recurrence on the CPU.
"""

from functools import partial

import pytest
import torch

from openk3.ops.kda import BoundedGate, kda, kda_step
from openk3.ops.kda.reference import kda_reference

gpu = pytest.importorskip("openk3.ops.kda.gpu", reason="the kernels need triton")
pytestmark = pytest.mark.skipif(gpu.available() is not None, reason=f"backend 'triton': {gpu.available()}")

# (logits, whether A_log and dt_bias are U(0,1) or 0): the ten cases of kernels.md 9.4
CASES = [(-8, 0), (-4, 0), (0, 0), (8, 0), ("u8", 0), ("n8", 0), (-8, 1), (0, 1), ("u8", 1), ("n8", 1)]
SETS = ["slow", "strong", "mixed", *CASES]
RAGGED = [1300, 0, 547, 17, 1, 15, 16, 64, 63, 65, 2048]
NAMES = ["q", "k", "v", "z", "beta", "A_log", "dt_bias", "initial_state"]
LIMITS = dict(zip(NAMES, [0.008, 0.008, 0.008, 0.008, 0.015, 0.008, 0.008, 0.008], strict=True))


def draw(T, H, K, gates, beta_mean=0.0, N=1):
    """(q, k, v, z, beta, A_log, dt_bias, initial state), bf16 tokens, everything else float32."""
    r, u = partial(torch.randn, device="cuda"), partial(torch.rand, device="cuda")
    biased = gates == "strong" or gates[1] == 1
    A_log, dt_bias = (u(H), u(H, K)) if biased else (torch.zeros(H, device="cuda"), torch.zeros(H, K, device="cuda"))
    slow = u(T, H, K) * 4 - 12
    if gates in ("slow", "strong", "mixed"):
        half = (torch.arange(K, device="cuda") % 2).bool()
        z = {"slow": slow, "strong": r(T, H, K), "mixed": torch.where(half, slow, u(T, H, K) * 2 + 5)}[gates]
    else:
        value = gates[0]
        z = {"u8": u(T, H, K) * 16 - 8, "n8": r(T, H, K) * 8}.get(value)
        z = torch.full((T, H, K), float(value), device="cuda") if z is None else z
    tokens = [x.bfloat16() for x in (r(T, H, K), r(T, H, K), r(T, H, K), z, r(T, H) + beta_mean)]
    return [*tokens, A_log, dt_bias, r(N, H, K, K)]


def bounds(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def run(op, x, cu, **more):
    return op(*x[:5], cu_seqlens=cu, gate=BoundedGate(x[5], x[6]), initial_state=x[7], **more)


def exact(x, cu, **more):
    return run(lambda *a, **k: kda(*a, backend="torch", **k), [y.double() for y in x], cu, **more)


def error(got, want):
    assert got.isfinite().all()
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.fixture
def poisoned(monkeypatch):
    """Every tensor that the launches allocate starts as NaN (as -1 if it holds integers)."""
    empty = torch.empty

    def filled(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("beta_mean", [0.0, -4.0, 3.0])
@pytest.mark.parametrize("gates", SETS, ids=str)
@pytest.mark.parametrize("K", [64, 128])
def test_forward(K, gates, beta_mean, poisoned):
    offsets = [1000, 1024, 1300, 1300, sum(RAGGED)]
    x, cu = draw(sum(RAGGED), 4, K, gates, beta_mean, len(RAGGED)), bounds(RAGGED)
    want = exact(x, cu, state_offsets=offsets)
    for segments in (False, True):
        got, again = (run(gpu.kda, x, cu, state_offsets=offsets, segments=segments) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        assert max(error(a, b) for a, b in zip(got, want, strict=True)) < 0.005


@pytest.mark.parametrize("H", [1, 12])
@pytest.mark.parametrize("gates", ["slow", "strong"])
def test_long(H, gates):
    x, cu = draw(8192, H, 128, gates, 3.0), bounds([8192])
    assert max(error(a, b) for a, b in zip(run(gpu.kda, x, cu), exact(x, cu), strict=True)) < 0.005


@pytest.mark.parametrize(
    ("noise", "beta", "z"), [(0, 20, -12), (0.02, 20, -12), (0.05, 3.9, -8), (0.1, 4.6, -12), (0.3, 3, -8)]
)
def test_near_parallel_keys(noise, beta, z):
    x, cu = draw(1024, 4, 128, (z, 0)), bounds([1024])
    common, own = torch.randn(1, 4, 128, device="cuda"), torch.randn(1024, 4, 128, device="cuda")
    x[1] = (common / common.norm(dim=-1, keepdim=True) + noise * own / own.norm(dim=-1, keepdim=True)).bfloat16()
    x[4] = torch.full_like(x[4], beta)
    x[7].zero_()
    assert max(error(a, b) for a, b in zip(run(gpu.kda, x, cu), exact(x, cu), strict=True)) < 0.012


@pytest.mark.parametrize("gates", SETS, ids=str)
def test_backward(gates, poisoned):
    x, cu = [y.requires_grad_() for y in draw(1024, 32, 128, gates)], bounds([1024])
    weights = torch.randn_like(x[2]), torch.randn_like(x[7])
    first, second = (torch.autograd.grad(run(gpu.kda, x, cu), x, weights) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wide = [y.detach().double().requires_grad_() for y in x]
    want = torch.autograd.grad(exact(wide, cu), wide, [w.double() for w in weights])
    for name, a, b in zip(NAMES, first, want, strict=True):
        if b.norm() > 1e-6:  # the gradient of A_log is exactly 0 at logit 0
            assert error(a, b) < LIMITS[name], name


@pytest.mark.parametrize("gates", ["slow", "strong"])
@pytest.mark.parametrize("K", [64, 128])
def test_backward_ragged(K, gates, poisoned):
    lengths, offsets = [300, 0, 47, 17, 1, 64, 63], [100, 128, 300]
    x, cu = [y.requires_grad_() for y in draw(sum(lengths), 32, K, gates, 0.0, len(lengths))], bounds(lengths)
    weights = torch.randn_like(x[2]), torch.randn_like(x[7]), torch.randn(3, *x[7].shape[1:], device="cuda")
    got = torch.autograd.grad(run(gpu.kda, x, cu, state_offsets=offsets), x, weights)
    wide = [y.detach().double().requires_grad_() for y in x]
    want = torch.autograd.grad(exact(wide, cu, state_offsets=offsets), wide, [w.double() for w in weights])
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert error(a, b) < LIMITS[name], name


def test_alone_and_in_company():
    lengths = [700, 5000, 33]
    x, cu = draw(sum(lengths), 4, 128, "slow", N=3), bounds(lengths)
    o, final = run(gpu.kda, x, cu)
    for n, (begin, end) in enumerate(zip(cu.tolist()[:-1], cu.tolist()[1:], strict=True)):
        one = [*(y[begin:end] for y in x[:5]), x[5], x[6], x[7][n : n + 1]]
        alone, last = run(gpu.kda, one, bounds([end - begin]))
        assert torch.equal(o[begin:end], alone)
        assert torch.equal(final[n], last[0])


def test_graph_with_other_bounds():
    x, cu = draw(4096, 4, 128, "slow", N=3), bounds([1000, 96, 3000])
    run(gpu.kda, x, cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(gpu.kda, x, cu)
    for lengths in ([1000, 96, 3000], [0, 4096, 0], [31, 65, 4000]):
        cu.copy_(bounds(lengths))
        graph.replay()
        assert max(error(a, b) for a, b in zip(got, exact(x, cu), strict=True)) < 0.005


def test_strided_tokens():
    T, H, K = 200, 4, 128
    x, cu = draw(T, H, K, "slow"), bounds([T])
    fused = torch.cat([y.view(T, -1) for y in x[:4]], 1)
    views = [fused[:, i * H * K : (i + 1) * H * K].view(T, H, K) for i in range(4)]
    for a, b in zip(run(gpu.kda, x, cu), run(gpu.kda, [*views, *x[4:]], cu), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("K", [64, 128])
def test_step(K, M):
    slots = torch.tensor([3, -1, 0, 5], device="cuda")
    x = draw(4 * M, 12, K, "slow", N=7)
    pool = x[7].clone()
    o = gpu.kda_step(*x[:5], state_SHKV=pool, slots_N=slots, gate=BoundedGate(x[5], x[6]))
    wide = [y.double() for y in x]
    for n, slot in enumerate(slots.tolist()):
        rows = slice(n * M, n * M + M)
        if slot < 0:
            assert not o[rows].any()
            continue
        want, state, _ = kda_reference(
            *(y[rows] for y in wide[:5]),
            bounds=(0, M),
            offsets=(),
            gate=BoundedGate(*wide[5:7]),
            scale=K**-0.5,
            initial_state=wide[7][slot : slot + 1],
        )
        assert error(o[rows], want) < 0.005
        assert error(pool[slot], state[0]) < 1e-5
    untouched = [1, 2, 4, 6]
    assert torch.equal(pool[untouched], x[7][untouched])


@pytest.mark.parametrize("gates", ["slow", "strong"])
def test_segment(gates):
    """With a small beta on slow gates the map is far from zero, so that a wrong one shows."""
    lengths = [3000, 0, 100]
    x, cu = draw(sum(lengths), 4, 128, gates, -4.0, 3), bounds(lengths)
    M, S = gpu.kda_segment(*x[1:5], cu_seqlens=cu, gate=BoundedGate(x[5], x[6]))
    zero, one = torch.zeros_like(x[7]), torch.eye(128, device="cuda").expand_as(x[7])
    state = exact([*x[:7], zero], cu)[1]
    x[2] = torch.zeros_like(x[2])
    assert error(S, state) < 0.005
    assert error(M, exact([*x[:7], one], cu)[1]) < 0.005


def test_by_name():
    x, cu = draw(100, 2, 128, "slow"), bounds([100])
    for a, b in zip(run(kda, x, cu, backend="triton"), run(gpu.kda, x, cu), strict=True):
        assert torch.equal(a, b)
    pools, slots = (x[7].clone(), x[7].clone()), torch.zeros(1, device="cuda", dtype=torch.int32)
    gate = BoundedGate(x[5], x[6])
    one = [y[:1] for y in x[:5]]
    a = kda_step(*one, state_SHKV=pools[0], slots_N=slots, gate=gate, backend="triton")
    b = gpu.kda_step(*one, state_SHKV=pools[1], slots_N=slots, gate=gate)
    assert torch.equal(a, b)
    assert torch.equal(*pools)
    narrow = [y[..., :32].contiguous() for y in x[:4]]
    with pytest.raises(ValueError, match="K = V in"):
        kda(*narrow, x[4], cu_seqlens=cu, gate=BoundedGate(x[5], x[6][:, :32]), backend="triton")
    with pytest.raises(ValueError, match="bounded gate"):
        kda(*x[:5], cu_seqlens=cu, backend="triton")
