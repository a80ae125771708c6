"""What bf16 inputs lose in attention: one rounding of the result, and nothing with a sign."""

import pytest
import torch

from openk3.ops.mla import KVView, mla_attend, mla_over_view

T, H, Q, V, L, R = 384, 4, 24, 16, 16, 8
SCALE = Q**-0.5
CU = torch.tensor([0, T], dtype=torch.int32)
BACKENDS = ["reference", "blocked", "sdpa"]


def draw(*shape: int, seed: int, mean: float = 0.0) -> torch.Tensor:
    return (mean + 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def inputs() -> list[torch.Tensor]:
    """Attention spread over many keys, and values of one sign, whose sum grows with every key."""
    return [draw(T, H, Q, seed=0), draw(T, H, Q, seed=1), draw(T, H, V, seed=2, mean=1.0)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    p = torch.softmax((q @ k.transpose(1, 2) * SCALE).masked_fill(hidden, float("-inf")), dim=-1)
    return (p @ v).transpose(0, 1)


def summed_in_bfloat16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Key by key, as an online softmax whose output tile is bf16: o <- bf16(o + p v), divided by sum p at the end."""
    s = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * SCALE
    s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    p = torch.exp(s - s.amax(-1, keepdim=True))
    o = torch.zeros(H, T, V, dtype=torch.bfloat16)
    for j in range(T):
        o = (o.float() + p[..., j : j + 1] * v[j].float()[:, None]).bfloat16()
    return (o.float() / p.sum(-1, keepdim=True)).bfloat16().transpose(0, 1)


def rounded_once(result: torch.Tensor, wide: torch.Tensor) -> bool:
    """All but a few numbers, which float32 puts on the other side of a midpoint, are the exact ones rounded."""
    return result.dtype == torch.bfloat16 and (result != wide.bfloat16()).double().mean() < 0.002


@pytest.mark.row(27)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_is_summed_in_float32(backend: str) -> None:
    q, k, v = inputs()
    want = exact(q, k, v)
    o = mla_attend(q, k, v, cu_seqlens_q=CU, cu_seqlens_k=CU, scale=SCALE, backend=backend)
    assert rounded_once(o, want)
    low = summed_in_bfloat16(q, k, v)
    assert not rounded_once(low, want)
    mean, biased = ((x.double() - want).mean() / want.abs().mean() for x in (o, low))
    assert abs(mean) < 1e-4  # the last rounding errs to either side
    assert abs(biased) > 1e-2  # a running sum in bf16 rounds what is small beside it to one side, key after key


@pytest.mark.row(27)
def test_the_context_of_the_absorbed_form_is_summed_in_float32() -> None:
    rows, q = draw(T, L + R, seed=3, mean=1.0), draw(T, H, Q, seed=4)
    w_kv_b = draw(H * (Q - R + V), L, seed=5)
    view = KVView(rows[None], torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    o = mla_over_view(q, view, w_kv_b, nope=Q - R, cu_seqlens=CU, scale=SCALE, form="absorbed")
    kv = torch.einsum("tl,hwl->thw", rows[:, :L].double(), w_kv_b.double().unflatten(0, (H, -1)))
    k = torch.cat([kv[..., : Q - R], rows[:, None, L:].double().expand(-1, H, -1)], dim=-1)
    assert rounded_once(o, exact(q, k, kv[..., Q - R :]))


@pytest.mark.row(27)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_come_from_the_float32_output(backend: str) -> None:
    """The backward's row sums of d_o * o see the output before it was rounded."""
    leaves = [t.requires_grad_() for t in inputs()]
    d_o = draw(T, H, V, seed=6, mean=1.0)
    o = mla_attend(*leaves, cu_seqlens_q=CU, cu_seqlens_k=CU, scale=SCALE, backend=backend)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(exact(*wide), wide, d_o.double())
    for gradient, want in zip(torch.autograd.grad(o, leaves, d_o), expected, strict=True):
        assert rounded_once(gradient, want)
