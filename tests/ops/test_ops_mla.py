"""Latent attention: against PyTorch's attention, packed = separate, three forms that agree, pages, no positions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import openk3.ops.attention as blocks
from openk3.ops.mla import KVView, mla_attend, mla_expanded, mla_over_view

H, NOPE, R, V, L = 2, 4, 2, 3, 5
SCALE = (NOPE + R) ** -0.5
BACKENDS = ["reference", "blocked", "sdpa"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of queries even in small cases: three rows at most, fewer where there are many keys."""
    monkeypatch.setattr(blocks, "ROWS", 3)
    monkeypatch.setattr(blocks, "SCORES", 32)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def qkv(n_q: int, n_k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return draw(n_q, H, NOPE + R, seed=seed), draw(n_k, H, NOPE + R, seed=seed + 1), draw(n_k, H, V, seed=seed + 2)


def one_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention on one sequence, last query at the last key."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)[0].transpose(0, 1)


def attend(q, k, v, lq, lk, backend):
    return mla_attend(q, k, v, cu_seqlens_q=cu(*lq), cu_seqlens_k=cu(*lk), scale=SCALE, backend=backend)


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=8)


@settings(max_examples=60)
@given(pairs=LENGTHS, whole=st.booleans(), backend=st.sampled_from(BACKENDS), seed=st.integers(0, 99))
def test_packed_equals_separate(pairs, whole, backend, seed):
    lq = [new for new, _ in pairs]
    lk = lq if whole else [new + old for new, old in pairs]
    q, k, v = qkv(sum(lq), sum(lk), seed)
    o = attend(q, k, v, lq, lk, backend)
    assert o.shape == (sum(lq), H, V)
    parts = zip(o.split(lq), q.split(lq), k.split(lk), v.split(lk), strict=True) if pairs else ()
    for o_i, *qkv_i in parts:
        if len(o_i):
            torch.testing.assert_close(o_i, one_sequence(*qkv_i), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("lq", "lk"),
    [
        ((8, 8), (8, 8)),
        ((9, 0, 2, 8, 9), (9, 0, 2, 8, 9)),
        ((1, 3, 0, 3, 1), (4, 5, 2, 5, 4)),
        ((4, 4, 4), (4, 6, 4)),
    ],
)
def test_gradients(lq, lk):
    leaves = [t.requires_grad_() for t in qkv(sum(lq), sum(lk))]
    d_o = draw(sum(lq), H, V, seed=9)
    outputs = [attend(*leaves, lq, lk, backend) for backend in BACKENDS]
    expected, *grads = [(o, *torch.autograd.grad(o, leaves, d_o)) for o in outputs]
    for results in grads:
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_gradcheck():
    leaves = tuple(t.requires_grad_() for t in qkv(7, 7))
    for backend in BACKENDS:
        assert torch.autograd.gradcheck(lambda q, k, v, b=backend: attend(q, k, v, (4, 3), (4, 3), b), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_neighbours_never_leak(backend):
    """Sequences of lengths 5 and 6 share a padded batch; a NaN in one leaves the other and its gradients whole."""
    q, k, v = (t.requires_grad_() for t in qkv(11, 11))
    clean = attend(q, k, v, (5, 6), (5, 6), backend)
    poison = torch.zeros(11, 1, 1, dtype=torch.float64)
    poison[5:] = float("nan")
    o = attend(q + poison, k + poison, v + poison, (5, 6), (5, 6), backend)
    torch.testing.assert_close(o[:5], clean[:5], rtol=0, atol=0)
    assert o[5:].isnan().all()
    for grad in torch.autograd.grad(o[:5].sum(), (q, k, v)):
        assert grad[:5].isfinite().all()


def test_softmax_and_output_are_float32_for_bf16():
    q, k, v = (t.bfloat16() for t in qkv(12, 12))
    exact = attend(q.double(), k.double(), v.double(), (12,), (12,), "reference")
    for backend in BACKENDS:
        o = attend(q, k, v, (12,), (12,), backend)
        assert o.dtype == torch.bfloat16
        torch.testing.assert_close(o.double(), exact, rtol=2**-8, atol=1e-5)


def latents(n_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, latent, k_pe, w_kv_b."""
    q = draw(n_tokens, H, NOPE + R, seed=seed)
    return q, draw(n_tokens, L, seed=seed + 1), draw(n_tokens, R, seed=seed + 2), draw(H * (NOPE + V), L, seed=7)


@pytest.mark.row(21)
def test_expansion_is_interleaved_per_head_and_shares_one_key_part():
    q, latent, k_pe, w = latents(6)
    o = mla_expanded(q, latent, k_pe, w, nope=NOPE, cu_seqlens=cu(6), scale=SCALE)
    for h in range(H):
        w_h = w[h * (NOPE + V) : (h + 1) * (NOPE + V)]
        keys = torch.cat([latent @ w_h[:NOPE].t(), k_pe], dim=1)
        alone = one_sequence(q[:, h : h + 1], keys[:, None], (latent @ w_h[NOPE:].t())[:, None])
        torch.testing.assert_close(o[:, h : h + 1], alone, rtol=0, atol=1e-12)


def empty_view(n: int, page: int, pages: int, seed: int = 0, fill: float = float("nan")) -> KVView:
    """A view of n sequences whose pages lie scattered over a pool of poisoned rows."""
    order = torch.randperm(n * pages + 3, generator=torch.Generator().manual_seed(seed))[: n * pages]
    pool = torch.full((n * pages + 3, page, L + R), fill, dtype=torch.float64)
    return KVView(pool, order.view(n, pages), torch.zeros(n, dtype=torch.int32))


@pytest.mark.row(21)
@settings(max_examples=40)
@given(
    turns=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    page=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_absorbed_expanded_and_no_memory_agree_in_any_split(turns, page, seed):
    """Three sequences advance turn by turn; only latents and the shared key part are stored."""
    lengths = [sum(turn[n] for turn in turns) for n in range(3)]
    q, latent, k_pe, w = latents(sum(lengths), seed)
    whole = mla_expanded(q, latent, k_pe, w, nope=NOPE, cu_seqlens=cu(*lengths), scale=SCALE, backend="reference")
    whole, q, rows = (t.split(lengths) for t in (whole, q, torch.cat([latent, k_pe], dim=1)))
    view = empty_view(3, page, -(-max(*lengths, 1) // page), seed)
    for turn in turns:
        spans = [slice(int(view.lengths[n]), int(view.lengths[n]) + turn[n]) for n in range(3)]
        view.append(torch.cat([rows[n][span] for n, span in enumerate(spans)]), cu(*turn))
        new_q = torch.cat([q[n][span] for n, span in enumerate(spans)])
        expected = torch.cat([whole[n][span] for n, span in enumerate(spans)])
        for form in ("expanded", "absorbed", "auto"):
            o = mla_over_view(new_q, view, w, nope=NOPE, cu_seqlens=cu(*turn), scale=SCALE, form=form)
            torch.testing.assert_close(o, expected, rtol=0, atol=1e-11)
        view = view._replace(lengths=view.lengths + torch.tensor(turn, dtype=torch.int32))
    for n in range(3):
        torch.testing.assert_close(view.gather(n, lengths[n]), rows[n], rtol=0, atol=0)


@settings(max_examples=40)
@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=5), page=st.integers(1, 6), seed=st.integers(0, 99))
def test_append_writes_its_rows_and_no_others(counts, page, seed):
    pages = 3 + 7 // page
    view = empty_view(len(counts), page, pages, seed)
    stored = torch.tensor([(seed * (n + 3)) % (2 * page + 1) for n in range(len(counts))], dtype=torch.int32)
    view = view._replace(lengths=stored)
    rows = draw(sum(counts), L + R, seed=seed)
    view.append(rows, cu(*counts))
    for n, new in enumerate(rows.split(counts)):
        kept = view.gather(n, int(stored[n]) + len(new))
        assert kept[: int(stored[n])].isnan().all()
        torch.testing.assert_close(kept[int(stored[n]) :], new, rtol=0, atol=0)
    assert int((~view.pool.isnan()).all(-1).sum()) == sum(counts)


@pytest.mark.row(22)
def test_a_stored_row_at_k3_sizes():
    """512 + 64 values a token and layer; 24 layers; bf16."""
    pool = torch.zeros(1, 4, 512 + 64, dtype=torch.bfloat16)
    view = KVView(pool, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    rows = torch.randn(3, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    view.append(rows, cu(3))
    per_token = view.gather(0, 3)[0]
    assert per_token.numel() == 576
    assert 24 * per_token.numel() == 13824
    assert 24 * per_token.nbytes == 27648
    assert view.pool[0, 3].count_nonzero() == 0  # three tokens, three rows
    q = torch.randn(1, 96, 192).bfloat16()
    w = 0.05 * torch.randn(96 * 256, 512).bfloat16()
    two = view._replace(lengths=torch.tensor([2], dtype=torch.int32))
    forms = [
        mla_over_view(q, two, w, nope=128, cu_seqlens=cu(1), scale=192**-0.5, form=form).float()
        for form in ("absorbed", "expanded")
    ]
    assert forms[0].shape == (1, 96, 128)
    torch.testing.assert_close(forms[0], forms[1], rtol=0.02, atol=0.02)


@pytest.mark.row(23)
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_no_positions(form):
    """Reordering the past leaves the current token's output unchanged."""
    q, latent, k_pe, w = latents(9)
    shuffled = torch.cat([torch.randperm(8, generator=torch.Generator().manual_seed(1)), torch.tensor([8])])
    outputs = []
    for order in (torch.arange(9), shuffled):
        view = empty_view(1, 4, 3)
        view.append(torch.cat([latent, k_pe], dim=1)[order], cu(9))
        view = view._replace(lengths=torch.tensor([8], dtype=torch.int32))
        outputs.append(mla_over_view(q[8:], view, w, nope=NOPE, cu_seqlens=cu(1), scale=SCALE, form=form))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
    changed = mla_expanded(q, latent + 1, k_pe, w, nope=NOPE, cu_seqlens=cu(9), scale=SCALE)[8:]
    assert (changed - outputs[0]).abs().max() > 0.01


def test_one_page_is_read_in_place():
    view = empty_view(2, 8, 1)
    view.append(draw(6, L + R), cu(2, 4))
    assert view.gather(1, 4).data_ptr() == view.pool[view.table[1, 0]].data_ptr()


def test_errors_name_the_value():
    q, k, v = qkv(5, 5)
    with pytest.raises(ValueError, match=r"more queries than keys: \(queries, keys\) = \(4, 2\)"):
        attend(q, k, v, (1, 4), (3, 2), "auto")
    view = empty_view(1, 4, 2)
    with pytest.raises(ValueError, match="a sequence of 9 tokens exceeds its 2 pages of 4"):
        view.append(draw(9, L + R), cu(9))
    unassigned = view._replace(table=torch.tensor([[3, -1]]))
    with pytest.raises(ValueError, match="not assigned"):
        unassigned.append(draw(5, L + R), cu(5))
    with pytest.raises(ValueError, match="length = 9 is not within the 2 pages of 4 rows"):
        view.gather(0, 9)
    with pytest.raises(ValueError, match="form = 'folded'"):
        mla_over_view(q, view, draw(H * (NOPE + V), L), nope=NOPE, cu_seqlens=cu(5), scale=SCALE, form="folded")
