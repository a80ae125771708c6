"""The chunk form equals the recurrence: values, states at offsets and all gradients, for every cut and every decay."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kda_cases import NAMES, Case, cu, draw, gated, largest, run, ungated, uniform, with_gradients
from torch import Tensor

from openk3.ops.kda import chunked, kda, pairs
from openk3.ops.kda.chunked import kda_chunked
from openk3.ops.kda.gate import activate
from openk3.ops.kda.reference import kda_reference
from openk3.ops.kda.triangle import inverse_unit_lower

BOUNDS = (0, 40, 40, 110, 113, 177)
OFFSETS = (110, 97, 3, 177, 60)
FORMS = {"whole chunk": (60.0, 80.0), "tiles": (-1.0, 80.0), "pairs": (-1.0, -1.0)}


def chunks_of(case: Case, chunk: int, bounds: tuple[int, ...] = BOUNDS, offsets: tuple[int, ...] = OFFSETS) -> tuple:
    """The chunk form for one chunk length, 0 for the recurrence."""
    options = {
        "bounds": bounds, "offsets": offsets, "gate": case.gate, "scale": case.k.shape[-1] ** -0.5,
        "initial_state": case.state,
    }  # fmt: skip
    return kda_chunked(*case[:5], **options, chunk=chunk) if chunk else kda_reference(*case[:5], **options)


def assert_equal(case: Case, got: tuple, want: tuple, limit: float, gradient_limit: float) -> None:
    for name, a, b in zip(("o", "final", "states"), got, want, strict=True):
        assert largest(a, b) < limit, name
    got, want = with_gradients(case, got), with_gradients(case, want)
    for name in want:
        assert largest(got[name], want[name]) < gradient_limit, f"gradient of {name}"


@pytest.mark.row(9, 11)
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["strong", "slow", "mixed", "ungated"])
def test_equals_the_recurrence(chunk: int, form: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ungated(177, 5) if regime == "ungated" else gated(177, 5, regime=regime)
    monkeypatch.setattr(chunked, "MILD_RANGE", FORMS[form][0])
    monkeypatch.setattr(pairs, "TILE_RANGE", FORMS[form][1])
    assert_equal(case, chunks_of(case, chunk), chunks_of(case, 0), 1e-12, 1e-10)


@pytest.mark.row(9)
def test_every_chunk_is_treated_by_its_own_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head mild, one in need of tiles, one in need of pairs, in the same call; then pairs in small portions."""
    case = ungated(150, 1, H=3, K=4)
    with torch.no_grad():
        case.g.copy_(torch.stack([uniform(-0.1, 0, 150, 4), uniform(-5, -4, 150, 4), uniform(-300, 0, 150, 4)], 1))
    wild = [needs.tolist() for needs in record_needs(case)]
    assert wild == [[False] * 3 + [True] * 3]
    for budget in (chunked.PAIR_BUDGET, 1):
        monkeypatch.setattr(chunked, "PAIR_BUDGET", budget)
        got, want = (chunks_of(case, chunk, (0, 150), (70,)) for chunk in (64, 0))
        assert_equal(case, got, want, 1e-12, 1e-10)


def record_needs(case: Case) -> list[Tensor]:
    """What each group of chunks that are not mild is found to need, in chunks of 64."""
    seen, find = [], pairs.needs_pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "needs_pairs", lambda g: seen.append(find(g)) or seen[-1])
        chunks_of(case, 64, (0, 150), ())
    return [torch.sort(needs.int()).values.bool() for needs in seen]


@pytest.mark.row(11)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_by_finite_differences(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "MILD_RANGE", FORMS[form][0])
    monkeypatch.setattr(pairs, "TILE_RANGE", FORMS[form][1])
    case = gated(39, 2, H=2, K=3, V=2)

    def outputs(q, k, v, g, beta, A_log, dt_bias, state):
        gate = case.gate._replace(A_log_H=A_log, dt_bias_HK=dt_bias)
        return chunks_of(Case(q, k, v, g, beta, gate, state), 32, (0, 35, 39), (20, 37))

    assert torch.autograd.gradcheck(outputs, case.leaves, fast_mode=True)


def test_gradients_by_finite_differences_without_a_gate() -> None:
    case = ungated(21, 1, H=1, K=3, V=2, spread=1.0)

    def outputs(q, k, v, g, beta, state):
        return chunks_of(Case(q, k, v, g, beta, None, state), 16, (0, 21), ())[:2]

    assert torch.autograd.gradcheck(outputs, case.leaves)


def test_gradients_at_beta_zero_and_one() -> None:
    case = ungated(40, 1)
    with torch.no_grad():
        case.beta[::3], case.beta[1::3] = 0, 1
    assert_equal(case, chunks_of(case, 16, (0, 40), ()), chunks_of(case, 0, (0, 40), ()), 1e-12, 1e-10)


@pytest.mark.row(11)
@pytest.mark.parametrize("used", [0, 1, 2])
def test_gradients_through_one_output_alone(used: int) -> None:
    case = gated(60, 1)
    got, want = (chunks_of(case, chunk, (0, 60), (25,))[used : used + 1] for chunk in (32, 0))
    if used:  # states do not depend on q: its gradient is zero, and the recurrence has none at all
        names = [n for n in NAMES if n != "q"]
        leaves = case.leaves[1:]
        got, want = (torch.autograd.grad(x[0].sum(), leaves) for x in (got, want))
        for name, a, b in zip(names, got, want, strict=True):
            assert largest(a, b) < 1e-10, name
    else:
        got, want = with_gradients(case, got), with_gradients(case, want)
        assert all(largest(got[n], want[n]) < 1e-10 for n in want)


def test_backward_twice_gives_the_same() -> None:
    case = gated(50, 1)
    o, _ = run(case, cu(50))
    first = torch.autograd.grad(o.sum(), case.leaves, retain_graph=True)
    second = torch.autograd.grad(o.sum(), case.leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivatives_are_refused() -> None:
    case = gated(20, 1)
    (dv,) = torch.autograd.grad(run(case, cu(20))[0].square().sum(), case.v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dv.sum().backward()


@pytest.mark.row(10)
def test_inside_and_across_chunks() -> None:
    """From a zero state only the triangle inside the chunk is left; with zero keys only the read of the old state."""
    case = gated(16, 1, H=1)
    g, beta = (x.detach()[:, 0] for x in activate(case.g, case.beta, case.gate))
    q, k = (x.detach()[:, 0] / (x.detach()[:, 0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in case[:2])
    Gam = g.cumsum(0).exp()
    L = torch.tril(beta[:, None] * (k * Gam) @ (k / Gam).T, -1)
    A = torch.tril((q * Gam) @ (k / Gam).T)
    inside = A @ torch.linalg.solve(torch.eye(16, dtype=torch.float64) + L, beta[:, None] * case.v.detach()[:, 0])
    zero = case._replace(state=case.state.detach() * 0)
    assert largest(run(zero, cu(16), scale=1.0, backend="torch")[0][:, 0], inside) < 1e-10
    no_keys = case._replace(k=case.k.detach() * 0)
    across = (q * Gam) @ case.state.detach()[0, 0]
    assert largest(run(no_keys, cu(16), scale=1.0, backend="torch")[0][:, 0], across) < 1e-10


@pytest.mark.row(14)
def test_diagonal_tiles_dense_and_pair_by_pair() -> None:
    x, k = draw(3, 2, 64, 8), draw(3, 64, 8)
    for g in (uniform(-5, 0, 3, 64, 8), torch.full((3, 64, 8), -5.0, dtype=torch.float64)):
        assert not pairs.needs_pairs(g).any()
        dense, exact = (pairs.decayed_products(x, k, g, pairwise).tril() for pairwise in (False, True))
        assert largest(dense, exact) < 1e-12
        single = pairs.decayed_products(x.float(), k.float(), g.float(), False).tril()
        assert largest(single.double(), exact) < 2e-5
        d = draw(3, 2, 64, 64).tril()
        for a, b in zip(*(pairs.decayed_products_backward(d, x, k, g, p) for p in (False, True)), strict=True):
            assert largest(a, b) < 1e-10
    # The reference in the middle of the tile leaves room in float32 for gradients of any size that occurs.
    large = pairs.decayed_products_backward(1e12 * d.float(), x.float(), k.float(), g.float(), False)
    for a, b in zip(large, pairs.decayed_products_backward(1e12 * d, x, k, g, True), strict=True):
        assert largest(a.double() / 1e12, b / 1e12) < 1e-4
    unbounded = torch.full((3, 64, 8), -30.0)
    assert pairs.needs_pairs(unbounded).all()
    assert not pairs.decayed_products(x.float(), k.float(), unbounded, False).tril().isfinite().all()
    G = unbounded.double().cumsum(1)
    want = torch.einsum("bsrk,bik,brik->bsri", x, k, (G[:, :, None] - G[:, None]).clamp(max=0).exp()).tril()
    assert largest(pairs.decayed_products(x.float(), k.float(), unbounded, True).tril().double(), want) < 1e-5


@pytest.mark.parametrize("size", [16, 32, 64])
def test_triangular_inverse(size: int) -> None:
    eye = torch.eye(size, dtype=torch.float64)
    random = draw(5, size, size).tril(-1) * 0.3
    parallel = torch.ones(5, size, size, dtype=torch.float64).tril(-1)  # identical keys, beta 1: powers reach 1e17
    for L in (random, parallel):
        assert largest(inverse_unit_lower(L) @ (eye + L), eye.expand(5, -1, -1)) < 1e-9
        single = inverse_unit_lower(L.float()).double()
        exact = torch.linalg.inv(eye + L)
        assert largest(single, exact) < 1e-5 * float(exact.abs().max())


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@pytest.mark.row(9)
@given(lengths=lengths, cuts=st.lists(st.integers(1, 200), max_size=4), chunk=st.sampled_from([16, 32, 64]))
def test_any_sequences_and_offsets(lengths: list[int], cuts: list[int], chunk: int) -> None:
    T, bounds = sum(lengths), tuple(cu(*lengths).tolist())
    offsets = tuple(c for c in cuts if c <= T)
    case = gated(T, len(lengths), H=1, K=4, V=3)
    for got, want in zip(chunks_of(case, chunk, bounds, offsets), chunks_of(case, 0, bounds, offsets), strict=True):
        assert largest(got, want) < 1e-12


@pytest.mark.row(9)
@given(lengths=lengths)
def test_packed_equals_separate(lengths: list[int]) -> None:
    bounds, T = cu(*lengths).tolist(), sum(lengths)
    case = gated(T, len(lengths), H=2, K=4, V=3)
    o, final = run(case, cu(*lengths), backend="torch")
    for n, (a, b) in enumerate(pairwise(bounds)):
        alone = case._replace(**{name: getattr(case, name)[a:b] for name in ("q", "k", "v", "g", "beta")})
        alone = alone._replace(state=case.state[n : n + 1])
        o_alone, final_alone = run(alone, cu(b - a), backend="torch")
        assert largest(o[a:b], o_alone) < 1e-10
        assert largest(final[n], final_alone[0]) < 1e-10


def test_two_calls_equal_one() -> None:
    """Resume at 1000, take a state at 1024: off the grid of the chunks."""
    case = gated(1100, 1, H=1, K=4, V=3, regime="slow")
    o, final, states = run(case, cu(1100), state_offsets=torch.tensor([1000, 1024]), backend="torch")
    late = case._replace(**{name: getattr(case, name)[1000:] for name in ("q", "k", "v", "g", "beta")})
    late = late._replace(state=states[:1])
    o_late, final_late, at_24 = run(late, cu(100), state_offsets=[24], backend="torch")
    assert largest(o_late, o[1000:]) < 1e-12
    assert largest(final_late, final) < 1e-12
    assert largest(at_24[0], states[1]) < 1e-12


def test_no_tokens_and_no_sequences() -> None:
    case = gated(0, 2)
    o, final, states = run(case, cu(0, 0), state_offsets=[])
    assert o.shape == (0, 2, 6)
    assert states.shape == (0, 2, 8, 6)
    assert torch.equal(final, case.state)
    final.sum().backward()
    assert torch.equal(case.state.grad, torch.ones_like(case.state))
    o, final = run(gated(0, 0), cu())
    assert o.shape == (0, 2, 6)
    assert final.shape == (0, 2, 8, 6)


def test_inputs_need_not_be_contiguous() -> None:
    case = gated(50, 1, K=6, V=6)
    wide = torch.cat([x.detach().flatten(1) for x in (case.q, case.k, case.v)], dim=-1)
    q, k, v = (x.unflatten(-1, (2, 6)) for x in wide.chunk(3, dim=-1))
    assert not q.is_contiguous()
    got = run(case._replace(q=q, k=k, v=v), cu(50), backend="torch")
    assert torch.equal(got[0], run(case, cu(50), backend="torch")[0])


def test_half_precision_inputs() -> None:
    case = gated(70, 1)
    low = case.to(torch.bfloat16)
    low = low._replace(gate=case.to(torch.float32).gate, state=case.to(torch.float32).state)
    o, final = run(low, cu(70), backend="torch")
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    exact = [x.detach().double() for x in low.leaves]
    want, want_final = kda(
        *exact[:5], gate=case.gate._replace(A_log_H=exact[5], dt_bias_HK=exact[6]), cu_seqlens=cu(70),
        initial_state=exact[7], backend="reference",
    )  # fmt: skip
    assert largest(o.double(), want) < 2e-2
    assert largest(final.double(), want_final) < 1e-5
    grads = torch.autograd.grad(o.float().sum() + final.sum(), low.leaves)
    assert [g.dtype for g in grads] == [x.dtype for x in low.leaves]
