"""The short convolution: causal, per channel, reset at every document, continued from a tail."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import openk3.ops.shortconv as module
from openk3.ops.shortconv import short_conv

BACKENDS = ["reference", "blocked"]


def draw(*shape: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks even in small cases: seven rows of five channels each."""
    monkeypatch.setattr(module, "BLOCK", 35)


@pytest.mark.row(5, 6)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_a_padded_depthwise_convolution(backend):
    x, weight = draw(20, 5), draw(5, 4, seed=1)
    y, tail = short_conv(x, weight, cu_seqlens=cu(20), backend=backend)
    expected = F.silu(F.conv1d(F.pad(x.t(), (3, 0))[None], weight[:, None], groups=5))[0].t()
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(tail[0], x[-3:], rtol=0, atol=0)
    torch.testing.assert_close(y[0], F.silu(x[0] * weight[:, 3]), rtol=0, atol=1e-15)  # w_3 takes the current token


@pytest.mark.row(5, 6)
@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_and_reset_at_boundaries(backend):
    x, weight = draw(20, 5), draw(5, 4, seed=1)
    y, _ = short_conv(x, weight, cu_seqlens=cu(8, 12), backend=backend)
    for t in (3, 7, 10):
        moved = x.clone()
        moved[t, 2] += 1.0
        changed = (short_conv(moved, weight, cu_seqlens=cu(8, 12), backend=backend)[0] != y).nonzero()
        last = min(t + 3, 7 if t < 8 else 19)
        assert changed.tolist() == [[s, 2] for s in range(t, last + 1)]


LENGTHS = st.lists(st.integers(0, 11), min_size=0, max_size=7)


@settings(max_examples=40)
@given(lengths=LENGTHS, seed=st.integers(0, 1000), with_tail=st.booleans())
def test_packed_equals_separate(lengths, seed, with_tail):
    module.BLOCK = 35  # restored by the fixture
    n, total = len(lengths), sum(lengths)
    x, weight = draw(total, 5, seed=seed), draw(5, 4, seed=1)
    tails = draw(n, 3, 5, seed=seed + 1) if with_tail else None
    y, final = short_conv(x, weight, cu_seqlens=cu(*lengths), initial_tail=tails, backend="blocked")
    assert y.shape == x.shape
    assert final.shape == (n, 3, 5)
    for i, x_i in enumerate(x.split(lengths) if lengths else ()):
        before = torch.zeros(3, 5, dtype=torch.float64) if tails is None else tails[i]
        padded = torch.cat([before, x_i])
        alone = F.silu(sum(padded[j : j + len(x_i)] * weight[:, j] for j in range(4)))
        start = sum(lengths[:i])
        torch.testing.assert_close(y[start : start + len(x_i)], alone, rtol=0, atol=1e-13)
        torch.testing.assert_close(final[i], padded[-3:], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 9, 20])
def test_any_split_continues_from_the_tail(backend, cut):
    x, weight = draw(20, 5), draw(5, 4, seed=1)
    y, tail = short_conv(x, weight, cu_seqlens=cu(20), backend=backend)
    first, carried = short_conv(x[:cut], weight, cu_seqlens=cu(cut), backend=backend)
    second, last = short_conv(x[cut:], weight, cu_seqlens=cu(20 - cut), initial_tail=carried, backend=backend)
    torch.testing.assert_close(torch.cat([first, second]), y, rtol=0, atol=1e-13)
    torch.testing.assert_close(last, tail, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(9,), (2, 0, 5, 1, 8), (1, 1, 1), (0,)])
def test_gradients(backend, lengths):
    total = sum(lengths)
    x, weight = draw(total, 5, grad=True), draw(5, 4, seed=1, grad=True)
    tail = draw(len(lengths), 3, 5, seed=2, grad=True)

    def f(x, weight, tail):
        return short_conv(x, weight, cu_seqlens=cu(*lengths), initial_tail=tail, backend=backend)

    assert torch.autograd.gradcheck(f, (x, weight, tail))


def test_gradients_without_a_tail():
    x, weight = draw(23, 5, grad=True), draw(5, 4, seed=1, grad=True)
    d_y = draw(23, 5, seed=3)
    grads = [
        torch.autograd.grad(short_conv(x, weight, cu_seqlens=cu(9, 2, 12), backend=b)[0], (x, weight), d_y)
        for b in BACKENDS
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_bf16_sums_in_float32():
    x, weight = draw(40, 5).bfloat16(), draw(5, 4, seed=1).float()
    exact, _ = short_conv(x.double(), weight.double(), cu_seqlens=cu(40), backend="reference")
    for backend in BACKENDS:
        y, tail = short_conv(x, weight, cu_seqlens=cu(40), backend=backend)
        assert y.dtype == tail.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)


def test_views_and_other_widths():
    """A slice of a wider tensor, and kernels of 2 and 3."""
    wide, weight = draw(20, 12), draw(5, 3, seed=1)
    view = wide[:, 4:9]
    for width in (2, 3):
        w = weight[:, :width]
        results = [short_conv(view, w, cu_seqlens=cu(12, 8), backend=b) for b in BACKENDS]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"weight \(4, 4\) must be \[C, W\]"):
        short_conv(torch.ones(3, 5), torch.ones(4, 4), cu_seqlens=cu(3))
    with pytest.raises(ValueError, match=r"initial_tail has shape \(1, 4, 5\), expected \(1, 3, 5\)"):
        short_conv(torch.ones(3, 5), torch.ones(5, 4), cu_seqlens=cu(3), initial_tail=torch.ones(1, 4, 5))
