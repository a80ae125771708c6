"""Routed experts: the sorted form against the loop, the path through the latent space, sizes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import openk3.ops.experts as module
from openk3.ops.experts import experts, grouped_linear, grouped_linear_weight_grad, sort_by_expert
from openk3.ops.norm import rms_norm
from openk3.ops.routing import route
from openk3.ops.situ import situ_glu, swiglu

BACKENDS = ["reference", "grouped"]
L, INNER = 6, 5  # latent and inner width


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stacks(n_experts: int, seed: int = 0) -> list[torch.Tensor]:
    """w1, w3, w2."""
    shapes = (n_experts, INNER, L), (n_experts, INNER, L), (n_experts, L, INNER)
    return [draw(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def by_token(z, ids, p, w1, w3, w2, activation=situ_glu) -> torch.Tensor:
    """Token by token, as the equation reads."""
    rows = []
    for t in range(len(z)):
        terms = [p[t, j] * (w2[e] @ activation(w1[e] @ z[t], w3[e] @ z[t])) for j, e in enumerate(ids[t].tolist())]
        rows.append(sum(terms))
    return torch.stack(rows) if rows else torch.zeros_like(z)


@pytest.mark.row(46)
@settings(max_examples=40)
@given(
    n_tokens=st.integers(0, 20),
    n_experts=st.integers(2, 9),
    k=st.integers(1, 4),
    seed=st.integers(0, 99),
    backend=st.sampled_from(BACKENDS),
)
def test_equals_the_equation_token_by_token(n_tokens, n_experts, k, seed, backend):
    """Any load, experts without a token included."""
    k = min(k, n_experts - 1)
    r = route(3 * draw(n_tokens, n_experts, seed=seed), torch.zeros(n_experts, dtype=torch.float64), k)
    args = draw(n_tokens, L, seed=seed + 1), r.ids_TK, r.weights_TK, *stacks(n_experts)
    torch.testing.assert_close(experts(*args, backend=backend), by_token(*args), rtol=0, atol=1e-11)


@pytest.mark.row(46)
@pytest.mark.parametrize("activation", [situ_glu, swiglu])
def test_gradients(activation):
    """Both forms against autograd through the equation; the router weights' gradient without kept outputs."""
    logits = (2 * draw(12, 5)).requires_grad_()
    z, *w = leaves = [t.requires_grad_() for t in (draw(12, L, seed=1), *stacks(5))]
    d_u = draw(12, L, seed=9)

    def grads(f):
        r = route(logits, torch.zeros(5, dtype=torch.float64), 2)
        return torch.autograd.grad(f(z, r.ids_TK, r.weights_TK, *w, activation=activation), [logits, *leaves], d_u)

    expected = grads(by_token)
    for backend in BACKENDS:
        for a, b in zip(grads(partial(experts, backend=backend)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_gradcheck():
    z, weights, *w = (t.requires_grad_() for t in (draw(4, L), draw(4, 2, seed=1).abs(), *stacks(3)))
    ids = torch.tensor([[0, 1], [2, 0], [0, 2], [2, 0]])
    assert torch.autograd.gradcheck(lambda z, p, *w: experts(z, ids, p, *w, backend="grouped"), (z, weights, *w))


@pytest.mark.row(46, 47, 49)
@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_moe_layer_against_an_explicit_loop(backend):
    """y = W_up RMSNorm( sum p_i E_i(W_down x) ) + sum E_shared(x) (report eq. 11), 32 experts, 2 shared."""
    d, n = 10, 32
    x, w_down, w_up, gamma = draw(9, d), draw(L, d, seed=1), draw(d, L, seed=2), draw(L, seed=3)
    w1, w3, w2 = stacks(n)
    shared = [[draw(*s, seed=20 + 3 * j + i) for i, s in enumerate(((7, d), (7, d), (d, 7)))] for j in range(2)]
    r = route(x @ draw(n, d, seed=5).t(), 0.1 * draw(n, seed=6), 4)

    def latent_norm(u: torch.Tensor) -> torch.Tensor:
        return rms_norm(u, gamma, 1e-5)

    u = experts(x @ w_down.t(), r.ids_TK, r.weights_TK, w1, w3, w2, backend=backend)
    fused = [torch.cat([expert[i] for expert in shared], dim=1 if i == 2 else 0) for i in range(3)]
    always_on = situ_glu(x @ fused[0].t(), x @ fused[1].t()) @ fused[2].t()
    y = latent_norm(u) @ w_up.t() + always_on
    for t in range(len(x)):
        z = w_down @ x[t]
        total = torch.zeros(L, dtype=torch.float64)
        for p, e in zip(r.weights_TK[t], r.ids_TK[t].tolist(), strict=True):
            g, up = w1[e] @ z, w3[e] @ z
            total += p * (w2[e] @ (4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(up / 25)))
        normed = total / (total.square().mean() + 1e-5).sqrt() * gamma
        both = sum(s2 @ situ_glu(s1 @ x[t], s3 @ x[t]) for s1, s3, s2 in shared)
        torch.testing.assert_close(y[t], w_up @ normed + both, rtol=0, atol=1e-10)
    # with the routed part off, what stays is the shared experts on the full width (row 47)
    off = experts(x @ w_down.t(), r.ids_TK, 0 * r.weights_TK, w1, w3, w2, backend=backend)
    torch.testing.assert_close(latent_norm(off) @ w_up.t() + always_on, always_on, rtol=0, atol=0)
    assert always_on.abs().min() > 0
    # the norm hides the scale of u (row 49), up to eps
    loud = experts(x @ w_down.t(), r.ids_TK, 10 * r.weights_TK, w1, w3, w2, backend=backend)
    torch.testing.assert_close(loud, 10 * u, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(latent_norm(loud), latent_norm(u), rtol=1e-5, atol=1e-5)


@pytest.mark.row(48)
def test_latent_width_halves_what_is_dispatched(monkeypatch):
    """Rows sent to experts are as wide as the latent: 3584 of 7168 at K3's size."""
    sent = []

    def spy(x, w, ends):
        sent.append(x)
        return grouped_linear(x, w, ends)

    monkeypatch.setattr(module, "grouped_linear", spy)
    x, ids = torch.zeros(8, 7168, dtype=torch.bfloat16), torch.arange(32).view(8, 4) % 8
    nbytes = {}
    for width in (7168, 3584):
        w1, w2 = (torch.zeros(8, *shape, dtype=torch.bfloat16) for shape in ((1, width), (width, 1)))
        sent.clear()
        experts(x[:, :width], ids, torch.ones(8, 4), w1, w1, w2, backend="grouped")
        nbytes[width] = sent[0].nbytes
    assert nbytes[3584] == 8 * 4 * 3584 * 2
    assert 2 * nbytes[3584] == nbytes[7168]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_of_bf16(backend):
    """Each expert's output is rounded, the sum over experts is float32 and rounded once."""
    r = route(draw(50, 6).float(), torch.zeros(6), 3)
    z, *w = (t.bfloat16() for t in (draw(50, L, seed=1), *stacks(6)))
    u = experts(z, r.ids_TK, r.weights_TK, *w, backend=backend)
    total = torch.zeros(50, L)
    for j in range(3):
        for t in range(50):
            e = r.ids_TK[t, j]
            w1, w3, w2 = (w_[e] for w_ in w)
            row = F.linear(situ_glu(F.linear(z[t : t + 1], w1), F.linear(z[t : t + 1], w3)), w2)[0]
            total[t] += r.weights_TK[t, j] * row.float()
    assert u.dtype == torch.bfloat16
    torch.testing.assert_close(u.float(), total, rtol=2**-8, atol=2**-7)
    grads = {
        b: torch.autograd.grad(
            experts(z_ := z.clone().requires_grad_(), r.ids_TK, r.weights_TK, *w, backend=b).float().sum(), z_
        )[0]
        for b in BACKENDS
    }
    assert grads[backend].dtype == torch.bfloat16
    torch.testing.assert_close(grads["grouped"].float(), grads["reference"].float(), rtol=0.05, atol=0.2)


def test_sorting_is_stable_and_its_inverse_is_right():
    ids = torch.tensor([[3, 0], [0, 3], [2, 3]])
    order = sort_by_expert(ids, 5)
    assert order.pair_R.tolist() == [1, 2, 4, 0, 3, 5]
    assert order.token_R.tolist() == [0, 1, 2, 0, 1, 2]
    assert order.ends_E.tolist() == [2, 2, 3, 6, 6]
    assert order.pair_R[order.row_TK].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_grouped_products():
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    x, w, dy = draw(7, 4), draw(3, 5, 4, seed=1), draw(7, 5, seed=2)
    y, dw = grouped_linear(x, w, ends), grouped_linear_weight_grad(dy, x, ends)
    torch.testing.assert_close(y, torch.cat([x[:2] @ w[0].t(), x[2:] @ w[2].t()]), rtol=0, atol=1e-13)
    expected = torch.stack([dy[:2].t() @ x[:2], torch.zeros(5, 4, dtype=torch.float64), dy[2:].t() @ x[2:]])
    torch.testing.assert_close(dw, expected, rtol=0, atol=1e-13)


def test_wrong_shapes_are_refused():
    w1, w3, w2 = stacks(3)
    ids, p = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"must be \[T, L\], \[E, I, L\]"):
        experts(draw(4, L + 1), ids, p, w1, w3, w2)
    with pytest.raises(ValueError, match=r"ids \(4, 2\) and weights \(4, 1\) must both be \[4, K\]"):
        experts(draw(4, L), ids, p[:, :1], w1, w3, w2)
