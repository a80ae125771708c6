"""Single steps over slots, segments as maps, and what a state costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kda_cases import Case, cu, draw, gated, largest, run, with_gradients

from openk3.ops.kda import compose, kda, kda_segment, kda_step

BACKENDS = ["reference", "torch"]


def step(case: Case, pool: torch.Tensor, slots: list[int], backend: str, **options) -> torch.Tensor:
    return kda_step(
        *case[:5], gate=case.gate, state_SHKV=pool, slots_N=torch.tensor(slots, dtype=torch.int32), backend=backend,
        **options,
    )  # fmt: skip


@pytest.mark.row(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("each", [1, 3])
def test_steps_over_slots_equal_the_recurrence(backend: str, each: int) -> None:
    slots, pool = [4, -1, 0, 2], draw(6, 2, 8, 6)
    case, before = gated(4 * each, 4), pool.clone()
    o = step(case, pool, slots, backend)
    live = case._replace(state=before[[4, 5, 0, 2]])
    want, final = run(live, cu(each, each, each, each), backend="reference")
    want = want.view(4, each, 2, 6).clone()
    want[1] = 0
    assert largest(o.view(4, each, 2, 6), want) < 1e-12
    assert largest(pool[[4, 0, 2]], final[[0, 2, 3]]) < 1e-12
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


def test_skipped_slots_are_not_read() -> None:
    pool = draw(3, 2, 8, 6)
    pool[0] = torch.nan
    case = gated(2, 1)
    with torch.no_grad():
        case.q[0] = case.k[0] = torch.nan
    o = step(case, pool, [-1, 2], "torch")
    assert torch.equal(o[0], torch.zeros(2, 6, dtype=torch.float64))
    assert o[1].isfinite().all()
    assert pool[1:].isfinite().all()
    assert torch.equal(step(case, pool, [-1, -1], "torch"), torch.zeros(2, 2, 6, dtype=torch.float64))
    assert step(gated(0, 1), pool, [], "torch").shape == (0, 2, 6)


@given(st.data())
def test_many_single_steps_equal_one_call(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 20))
    case, pool = gated(tokens, 1, H=1, K=4, V=3), draw(2, 1, 4, 3)
    case = case._replace(state=pool[1:].clone())
    parts = []
    for t in range(tokens):
        now = case._replace(**{name: getattr(case, name)[t : t + 1] for name in ("q", "k", "v", "g", "beta")})
        parts.append(step(now, pool, [1], "torch", scale=0.5))
    o, final = run(case, cu(tokens), backend="torch", scale=0.5)
    assert largest(torch.cat(parts), o) < 1e-12
    assert largest(pool[1], final[0]) < 1e-12


def test_a_pool_in_bfloat16_is_stepped_in_float32() -> None:
    case, pool = gated(1, 1), draw(2, 2, 8, 6).to(torch.bfloat16)
    case = case.to(torch.float32)
    case = case._replace(state=pool[1:].float())
    o = step(case, pool, [1], "torch")
    want, final = run(case, cu(1), backend="reference")
    assert largest(o, want) < 1e-6
    assert torch.equal(pool[1], final[0].to(torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", ["strong", "slow"])
def test_a_segment_is_its_map(backend: str, regime: str) -> None:
    """For slow gates with small beta too, where M is not almost zero."""
    case = gated(90, 3, regime=regime)
    case = case._replace(beta=case.beta.detach() - 3)
    _, final = run(case, cu(40, 0, 50), backend="reference")
    M, S = kda_segment(case.k, case.v, case.g, case.beta, gate=case.gate, cu_seqlens=cu(40, 0, 50), backend=backend)
    assert largest(M @ case.state + S, final) < 1e-10
    assert largest(M[1], torch.eye(8, dtype=torch.float64).expand(2, 8, 8)) == 0
    assert largest(S[1], torch.zeros(2, 8, 6, dtype=torch.float64)) == 0
    if regime == "slow":
        assert M[0].abs().max() > 0.1


def test_segments_fold_to_the_state_with_gradients() -> None:
    """Four pieces of one sequence, each knowing only its tokens: the fold gives the state and every gradient."""
    case = gated(80, 1, regime="slow")
    M, S = kda_segment(case.k, case.v, case.g, case.beta, gate=case.gate, cu_seqlens=cu(20, 30, 10, 20))
    total = (M[0], S[0])
    for piece in range(1, 4):
        total = compose((M[piece], S[piece]), total)
    _, final = run(case, cu(80), backend="reference")
    assert largest(total[0] @ case.state[0] + total[1], final[0]) < 1e-10
    used = case._replace(q=case.v)  # the final state does not depend on q
    got = with_gradients(used, ((total[0] @ case.state[0] + total[1])[None],))
    want = with_gradients(used, (final,))
    for name in want:
        assert largest(got[name], want[name]) < 1e-10, name


@pytest.mark.row(19)
def test_a_state_has_one_size_at_any_length() -> None:
    sizes = set()
    for tokens in (1024, 65536):
        tensors = [torch.randn(tokens, 1, 4) for _ in range(4)]
        _, final = kda(*tensors[:3], -tensors[3].abs(), torch.rand(tokens, 1), cu_seqlens=cu(tokens))
        sizes.add(final.untyped_storage().nbytes())
    assert sizes == {4 * 4 * 4}
    one = [torch.randn(1, 96, 128) for _ in range(4)]  # a layer of K3
    _, final = kda(*one[:3], -one[3].abs(), torch.rand(1, 96), cu_seqlens=cu(1))
    assert final.numel() == 1_572_864
    assert final.untyped_storage().nbytes() == 6_291_456
