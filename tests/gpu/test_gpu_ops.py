"""The ops around KDA on a GPU: every default backend against its reference in float64 on the CPU, and the grouped
products in bf16. Skipped where there is no CUDA device."""

import pytest
import torch

from openk3.ops.attnres import attnres, attnres_merge, attnres_scan
from openk3.ops.experts import experts
from openk3.ops.mla import KVView, mla_expanded, mla_over_view
from openk3.ops.norm import gated_head_norm, rms_norm
from openk3.ops.routing import histogram, histogram_bias, quantile_bias, route
from openk3.ops.shortconv import short_conv
from openk3.ops.situ import situ_glu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")

LENGTHS = [700, 0, 1, 3, 320, 512, 512]
T, D, H, E, K, L, INNER = sum(LENGTHS), 64, 4, 12, 3, 64, 32


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cu(device: str, lengths=LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def ids_of(device: str) -> torch.Tensor:
    return route(draw(T, E, seed=3), torch.zeros(E, dtype=torch.float64), K).ids_TK.to(device)


W_KV = (H * (16 + 16), 24)
CASES = {
    "rms_norm": ([(T, D), (D,)], lambda d, b, x, w: rms_norm(x, w, 1e-5, backend=b)),
    "head_norm": ([(T, H, 16), (16,), (T, H, 16)], lambda d, b, o, w, g: gated_head_norm(o, w, g, 1e-5, backend=b)),
    "situ_glu": ([(T, D), (T, D)], lambda d, b, g, u: situ_glu(g, u, backend=b)),
    "attnres": ([(T, D)] * 3 + [(D,), (D,)], lambda d, b, *s: attnres(s[:3], s[3], s[4], backend=b)),
    "short_conv": ([(T, D), (D, 4)], lambda d, b, x, w: short_conv(x, w, cu_seqlens=cu(d), backend=b)[0]),
    "mla": (
        [(T, H, 24), (T, 24), (T, 8), W_KV],
        lambda d, b, *x: mla_expanded(*x, nope=16, cu_seqlens=cu(d), scale=0.2, backend=b),
    ),
    "experts": (
        [(T, L), (T, K), (E, INNER, L), (E, INNER, L), (E, L, INNER)],
        lambda d, b, z, p, *w: experts(z, ids_of(d), p, *w, backend=b),
    ),
}


def results(name: str, device: str, backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of all inputs, as float64 on the CPU."""
    shapes, call = CASES[name]
    fan_in = L**-0.5 if name == "experts" else 1.0  # weights, so that the activation is not saturated
    drawn = [draw(*s, seed=i) * (fan_in if len(s) == 3 else 1.0) for i, s in enumerate(shapes)]
    inputs = [x.to(dtype).to(device).requires_grad_() for x in drawn]
    out = call(device, backend, *inputs)
    grads = torch.autograd.grad(out, inputs, draw(*out.shape, seed=99).to(out.dtype).to(device))
    return [t.detach().double().cpu() for t in (out, *grads)]


@pytest.mark.parametrize("name", CASES)
def test_float64_equals_the_reference(name):
    actual, expected = results(name, "cuda", "auto", torch.float64), results(name, "cpu", "reference", torch.float64)
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", CASES)
def test_bf16_stays_near_the_reference(name):
    """RMS of the error over RMS of the reference."""
    actual, expected = results(name, "cuda", "auto", torch.bfloat16), results(name, "cpu", "reference", torch.float64)
    for a, b in zip(actual, expected, strict=True):
        assert torch.isfinite(a).all()
        assert float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) < 0.02


def test_router_and_balance_agree_with_the_cpu():
    logits, bias = draw(512, 64).float(), 0.1 * draw(64, seed=1).float()
    outcomes = []
    for device in ("cpu", "cuda"):
        r = route(logits.to(device), bias.to(device), 4)
        counts = histogram(r.scores_TE, r.cutoff_T, bias.to(device))
        new = histogram_bias(counts, bias.to(device), 4), quantile_bias(r.scores_TE, r.cutoff_T, 4)
        outcomes.append([t.cpu().double() for t in (r.ids_TK.sort().values, r.cutoff_T, *new)])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    tied = route(torch.zeros(3, 8, device="cuda"), torch.zeros(8, device="cuda"), 3)
    assert tied.ids_TK.tolist() == [[0, 1, 2]] * 3


def test_two_phases_and_views_on_the_gpu():
    blocks, query, partial = [draw(9, D, seed=i).cuda() for i in range(3)], draw(D, seed=5).cuda(), draw(9, D).cuda()
    m, total, o = attnres_scan(blocks, query[None])
    merged = attnres_merge(m[0], total[0], o[0], partial, query)
    whole = attnres([*blocks, partial], query, torch.ones_like(query), backend="reference")
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)
    q, latent, k_pe, w = (draw(*s, seed=i).cuda() for i, s in enumerate([(9, H, 24), (9, 24), (9, 8), W_KV]))
    view = KVView(
        torch.zeros(8, 2, 32, dtype=torch.float64, device="cuda"),
        torch.randperm(8).view(2, 4).cuda(),
        torch.zeros(2, dtype=torch.int32, device="cuda"),
    )
    view.append(torch.cat([latent, k_pe], dim=1), cu("cuda", [5, 4]))
    expected = mla_expanded(q, latent, k_pe, w, nope=16, cu_seqlens=cu("cuda", [5, 4]), scale=0.2)
    for form in ("expanded", "absorbed"):
        o = mla_over_view(q, view, w, nope=16, cu_seqlens=cu("cuda", [5, 4]), scale=0.2, form=form)
        torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)
