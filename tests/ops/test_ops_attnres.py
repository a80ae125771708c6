"""Attention Residuals: golden case, equations, two-phase form."""

import json
from pathlib import Path

import pytest
import torch

from openk3.ops.attnres import attnres, attnres_merge, attnres_scan, attnres_weights, fold

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "attnres_small.json").read_text())
BACKENDS = ["reference", "fused"]
EPS = 1e-5


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


class Stack:
    """The golden net: five layers of linear stand-ins, walked as model.md section 7 says. `block` counts sub-layers."""

    def __init__(self, dtype=torch.float64, backend: str = "fused", block: int = 4):
        self.w = {k: torch.tensor(v, dtype=dtype) for k, v in GOLDEN["inputs"].items()}
        self.backend, self.block = backend, block
        self.reads: list[list[torch.Tensor]] = []  # the sources of every mix, in order

    def mix(self, sources, query, gamma):
        self.reads.append(sources)
        return attnres(sources, query, gamma, EPS, backend=self.backend)

    def run(self, zero_queries: bool = False):
        w = dict(self.w)
        if zero_queries:
            w |= {name: torch.zeros_like(w[name]) for name in ("attn_query", "mlp_query", "output_query")}
        blocks, partial, done = [], w["embedding"], 0
        for i in range(len(w["W_attn"])):
            for name, norm in (("attn", "input_layernorm"), ("mlp", "post_attention_layernorm")):
                sources = [*blocks, partial]
                x = self.mix(sources, w[f"{name}_query"][i], w[f"{name}_gamma"][i]) if blocks else partial
                if done % self.block == 0:
                    blocks, partial = [*blocks, partial], None
                y = rms(x, w[norm][i]) @ w["W_attn" if name == "attn" else "W_ffn"][i].t()
                partial = y if partial is None else partial + y
                done += 1
        self.blocks = blocks
        h = self.mix([*blocks, partial], w["output_query"], w["output_gamma"])
        return h, rms(h, w["final_norm"])


def expected(*path, dtype=torch.float64) -> torch.Tensor:
    value = GOLDEN
    for key in path:
        value = value[key]
    return torch.tensor(value, dtype=dtype)


@pytest.mark.row(35, 36)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_stack(backend, dtype):
    tolerance = GOLDEN["tolerance"]["float64" if dtype == torch.float64 else "float32"]
    stack = Stack(dtype, backend)
    h, final = stack.run()
    for actual, name in ((h, "h"), (final, "final")):
        error = (actual - expected("expected", name, dtype=dtype)).abs() / actual.abs().clamp(min=1)
        assert error.max() <= tolerance
    weights = attnres_weights(stack.reads[-1], stack.w["output_query"], stack.w["output_gamma"], EPS)
    torch.testing.assert_close(weights, expected("expected", "output_weights", dtype=dtype), rtol=0, atol=tolerance)
    torch.testing.assert_close(weights.sum(0), torch.ones(3, dtype=dtype), rtol=0, atol=1e-6)
    for name in ("values_normalised", "scores_divided_by_sqrt_hidden", "partial_sum_never_restarted"):
        assert (h - expected("wrong_variants", name, dtype=dtype)).abs().max() > 0.05


@pytest.mark.row(36)
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_query_is_the_plain_mean(backend):
    stack = Stack(backend=backend)
    h, _ = stack.run(zero_queries=True)
    torch.testing.assert_close(h, expected("zero_query", "h"), rtol=0, atol=1e-12)
    for sources in stack.reads:
        mean = torch.stack(sources).mean(0)
        zero = torch.zeros(8, dtype=torch.float64)
        mixed = attnres(sources, zero, torch.ones_like(zero), EPS, backend=backend)
        torch.testing.assert_close(mixed, mean, rtol=0, atol=1e-13)


@pytest.mark.row(37)
@pytest.mark.parametrize("backend", BACKENDS)
def test_key_norm_hides_the_scale_of_a_source(backend):
    sources, query, gamma = [draw(6, 64, seed=i) for i in range(4)], draw(64, seed=9), draw(64, seed=10)
    weights = attnres_weights(sources, query, gamma, EPS)
    loud = [sources[0], 100 * sources[1], *sources[2:]]
    torch.testing.assert_close(attnres_weights(loud, query, gamma, EPS), weights, rtol=1e-3, atol=0)
    mixed = attnres(loud, query, gamma, EPS, backend=backend)
    plain = attnres(sources, query, gamma, EPS, backend=backend)
    torch.testing.assert_close(mixed - plain, 99 * weights[1][:, None] * sources[1], rtol=1e-3, atol=1e-3)


@pytest.mark.row(35)
def test_blocks_of_one_sub_layer_are_full_attention_residuals():
    """Full form (report eq. 8, 9), straight from the definition: every earlier output and the embedding."""
    w = Stack().w
    outputs = [w["embedding"]]
    for i in range(5):
        for name, norm, matrix in (
            ("attn", "input_layernorm", "W_attn"),
            ("mlp", "post_attention_layernorm", "W_ffn"),
        ):
            v = torch.stack(outputs)
            score = (rms(v, torch.ones(8, dtype=torch.float64)) * w[f"{name}_gamma"][i] * w[f"{name}_query"][i]).sum(-1)
            x = (torch.softmax(score, 0)[..., None] * v).sum(0) if len(outputs) > 1 else outputs[0]
            outputs.append(rms(x, w[norm][i]) @ w[matrix][i].t())
    stack = Stack(block=1)
    stack.run()
    assert len(stack.reads[-1]) == 11
    torch.testing.assert_close(torch.stack(stack.reads[-1]), torch.stack(outputs), rtol=0, atol=1e-11)


@pytest.mark.row(45)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_two_phases_equal_one(dtype, tolerance):
    blocks = [draw(5, 32, seed=i).to(dtype) for i in range(4)]
    queries, gammas = 0.3 * draw(7, 32, seed=20).to(dtype), draw(7, 32, seed=21).to(dtype)
    partials = [draw(5, 32, seed=30 + i).to(dtype) for i in range(7)]
    folded = torch.stack([fold(q, g) for q, g in zip(queries, gammas, strict=True)])
    m, total, o = attnres_scan(blocks, folded, EPS)
    assert (m.shape, total.shape, o.shape) == ((7, 5), (7, 5), (7, 5, 32))
    for i in range(7):
        merged = attnres_merge(m[i], total[i], o[i], partials[i], folded[i], EPS)
        whole = attnres([*blocks, partials[i]], queries[i], gammas[i], EPS, backend="reference")
        torch.testing.assert_close(merged, whole, rtol=tolerance, atol=tolerance)
        alone = attnres_merge(m[i], total[i], o[i], None, folded[i], EPS)
        whole = attnres(blocks, queries[i], gammas[i], EPS, backend="reference")
        torch.testing.assert_close(alone, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.row(45)
def test_two_phases_hold_for_far_apart_scores():
    """Scores of hundreds: without the running maximum the sums overflow."""
    blocks, partial = [draw(4, 16, seed=i) for i in range(3)], draw(4, 16, seed=3)
    for scale in (300.0, -300.0):
        query = scale * partial[0]
        m, total, o = attnres_scan(blocks, query[None], EPS)
        merged = attnres_merge(m[0], total[0], o[0], partial, query, EPS)
        whole = attnres([*blocks, partial], query, torch.ones_like(query), EPS, backend="reference")
        torch.testing.assert_close(merged, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n_sources", [1, 2, 5])
def test_gradients(n_sources):
    leaves = [draw(3, 6, seed=i).requires_grad_() for i in range(n_sources)]
    query, gamma = draw(6, seed=8).requires_grad_(), draw(6, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, g, *s: attnres(s, q, g, EPS, backend="fused"), (query, gamma, *leaves), atol=1e-7
    )
    d_out = draw(3, 6, seed=10)
    grads = [
        torch.autograd.grad(attnres(leaves, query, gamma, EPS, backend=b), (query, gamma, *leaves), d_out)
        for b in BACKENDS
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_bf16_is_rounded_once():
    sources = [draw(40, 32, seed=i).bfloat16() for i in range(3)]
    query, gamma = draw(32, seed=8).bfloat16(), draw(32, seed=9).bfloat16()
    exact = attnres([s.double() for s in sources], query.double(), gamma.double(), EPS, backend="reference")
    for backend in BACKENDS:
        out = attnres(sources, query, gamma, EPS, backend=backend)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


def test_wrong_input_is_refused():
    one = torch.ones(2, 3)
    with pytest.raises(ValueError, match="at least one source"):
        attnres([], one[0], one[0])
    with pytest.raises(ValueError, match=r"one shape \[T, D\], got \[\(2, 3\), \(3, 3\)\]"):
        attnres([one, torch.ones(3, 3)], one[0], one[0])
    with pytest.raises(ValueError, match="as wide as the sources, 3"):
        attnres([one], torch.ones(4), one[0])
    with pytest.raises(ValueError, match="at least one finished block"):
        attnres_scan([], one)
