"""linear_cross_entropy: the chunked form equals torch's own cross-entropy, value and gradients, any chunk length."""

import pytest
import torch

from openk3.ops import cross_entropy
from openk3.ops.cross_entropy import linear_cross_entropy


def inputs(t: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(t)
    h = torch.randn(t, 6, dtype=dtype, generator=g)
    w = 3 * torch.randn(11, 6, dtype=dtype, generator=g)
    return h.requires_grad_(), w.requires_grad_(), torch.randint(11, (t,), generator=g)


@pytest.mark.parametrize("t", [0, 1, 7, 20])
@pytest.mark.parametrize("at_once", [1, 40, 10**6])
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, t: int, at_once: int) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", at_once)
    h, w, target = inputs(t)
    values, grads = [], []
    for backend in ("reference", "chunked"):
        loss = linear_cross_entropy(h, w, target, backend=backend)
        values.append(loss)
        grads.append(torch.autograd.grad(0.7 * loss, (h, w)))
    assert (values[0] - values[1]).abs() < 1e-10
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(*grads, strict=True) if a.numel())


def test_large_logits_stay_finite_and_no_grad_keeps_nothing() -> None:
    h, w, target = inputs(9, torch.float32)
    loss = linear_cross_entropy(h * 1e4, w, target)
    assert torch.isfinite(loss) and torch.isfinite(torch.autograd.grad(loss, w)[0]).all()
    with torch.no_grad():
        assert linear_cross_entropy(h, w, target).grad_fn is None


def test_bf16_accumulates_in_float32() -> None:
    h, w, target = inputs(20, torch.bfloat16)
    loss = linear_cross_entropy(h, w, target)
    assert loss.dtype == torch.float32
    exact = linear_cross_entropy(h.double(), w.double(), target)
    assert abs(loss.item() / exact.item() - 1) < 0.01


def test_shapes_that_do_not_fit_are_refused() -> None:
    h, w, target = inputs(4)
    with pytest.raises(ValueError, match="targets"):
        linear_cross_entropy(h, w, target[:3])
