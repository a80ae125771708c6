"""RMS norms against their formulas: rounding, gradients, head-wise norm and output gate."""

import pytest
import torch
import torch.nn.functional as F

from openk3.ops.norm import gated_head_norm, rms_norm


def draw(*shape: int, seed: int = 0, dtype=torch.float64, grad: bool = False) -> torch.Tensor:
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return t.requires_grad_(grad)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("shape", [(7, 5), (5,), (0, 5), (2, 3, 5)])
def test_rms_norm_equals_pytorch(backend, shape):
    x, weight = draw(*shape), draw(5, seed=1)
    out = rms_norm(x, weight, 1e-3, backend=backend)
    torch.testing.assert_close(out, F.rms_norm(x, (5,), weight, 1e-3), rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_rms_norm_rounds_before_the_weight(backend):
    """Normalised in float32, cast, then times the weight in the input's dtype (model.md section 4)."""
    x, weight = 3 * draw(64, 32, dtype=torch.bfloat16), draw(32, seed=1, dtype=torch.float32)
    out = rms_norm(x, weight, 1e-5, backend=backend)
    wide = x.float()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed.bfloat16() * weight.bfloat16()
    late = (normed * weight).bfloat16()
    assert out.dtype == torch.bfloat16
    assert (out == expected).float().mean() > 0.98  # a last float32 bit may tip a rounding
    assert (out == late).float().mean() < 0.9


def test_rms_norm_gradients():
    x, weight = draw(4, 6, grad=True), draw(6, seed=1, grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, backend="fused"), (x, weight))
    x, weight = draw(9, 32, dtype=torch.bfloat16, grad=True), draw(32, seed=1, dtype=torch.float32, grad=True)
    d_out = draw(9, 32, seed=2, dtype=torch.bfloat16)
    grads = [
        torch.autograd.grad(rms_norm(x, weight, 1e-5, backend=b), (x, weight), d_out) for b in ("reference", "fused")
    ]
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(a.abs().max()))


@pytest.mark.row(18)
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_head_norm_is_unit_per_head_before_weight_and_gate(backend):
    o = draw(5, 3, 16) * torch.tensor([1.0, 100.0, 1e-3], dtype=torch.float64)[:, None]
    no_gate = torch.full_like(o, 50.0)  # sigma = 1
    out = gated_head_norm(o, torch.ones(16, dtype=torch.float64), no_gate, 0.0, backend=backend)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(5, 3, dtype=torch.float64), rtol=0, atol=1e-12)
    weight = draw(16, seed=3)
    weighted = gated_head_norm(o, weight, no_gate, 0.0, backend=backend)
    torch.testing.assert_close(weighted, out * weight, rtol=1e-12, atol=1e-12)  # one weight for all heads


@pytest.mark.row(18)
def test_gate_is_a_sigmoid_after_the_norm():
    o, weight, gate = draw(5, 3, 16), draw(16, seed=1), draw(5, 3, 16, seed=2)
    normed = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    for backend in ("reference", "fused"):
        out = gated_head_norm(o, weight, gate, 1e-5, backend=backend)
        torch.testing.assert_close(out, normed / (1 + torch.exp(-gate)), rtol=0, atol=1e-13)


def test_gated_head_norm_gradients_and_dtypes():
    args = draw(3, 2, 4, grad=True), draw(4, seed=1, grad=True), draw(3, 2, 4, seed=2, grad=True)
    assert torch.autograd.gradcheck(lambda o, w, g: gated_head_norm(o, w, g, 1e-5, backend="fused"), args)
    o, gate = draw(3, 2, 4, dtype=torch.bfloat16), draw(3, 2, 4, seed=2, dtype=torch.bfloat16)
    weight = draw(4, seed=1, dtype=torch.float32)
    results = [gated_head_norm(o, weight, gate, 1e-5, backend=b) for b in ("reference", "fused")]
    assert results[0].dtype == results[1].dtype == torch.bfloat16
    exact = gated_head_norm(o.double(), weight.double(), gate.double(), 1e-5, backend="reference")
    for out in results:  # one rounding, at the end
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=0)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), but the last axis of x is 5 wide"):
        rms_norm(torch.ones(2, 5), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="gate"):
        gated_head_norm(torch.ones(2, 3, 5), torch.ones(5), torch.ones(2, 15), 1e-5)
