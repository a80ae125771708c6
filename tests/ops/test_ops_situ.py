"""SiTU-GLU against the golden table, its limits, and its gradient."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from openk3.ops.situ import situ_glu, swiglu

TABLE = json.loads((Path(__file__).parents[1] / "golden" / "situ_table.json").read_text())
BACKENDS = ["reference", "fused"]


def columns(rows) -> list[torch.Tensor]:
    return list(torch.tensor(rows, dtype=torch.float64).unbind(1))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert ((actual - expected).abs() / expected.abs().clamp(min=1)).max() <= tolerance


def with_grads(g: torch.Tensor, u: torch.Tensor, backend: str) -> tuple[torch.Tensor, ...]:
    g, u = g.clone().requires_grad_(), u.clone().requires_grad_()
    y = situ_glu(g, u, backend=backend)
    return y.detach(), *torch.autograd.grad(y.sum(), (g, u))


@pytest.mark.row(54, 57)
@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_values_and_derivatives(backend):
    g, u, _, _, y, dy_dg, dy_du = columns(TABLE["rows"])
    for actual, expected in zip(with_grads(g, u, backend), (y, dy_dg, dy_du), strict=True):
        close(actual, expected, TABLE["tolerance"]["float64"])
    g, u, y, dy_dg, dy_du = columns(TABLE["extreme"]["rows"])
    for dtype in (torch.float32, torch.float64):
        for actual, expected in zip(with_grads(g.to(dtype), u.to(dtype), backend), (y, dy_dg, dy_du), strict=True):
            assert torch.isfinite(actual).all()
            close(actual.double(), expected, 1e-6)
    g, u, wrong = columns(TABLE["wrong_variant"]["rows"])
    assert ((situ_glu(g, u, backend=backend) - wrong).abs() > 1e-3).all()


@pytest.mark.row(54)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bound_and_scalar_curves(backend):
    x, _, swi, situ = columns(TABLE["scalar_curves"]["rows"])
    close(situ_glu(x, x, backend=backend), situ, 1e-13)
    close(swiglu(x, x), swi, 1e-13)
    wild = 1e4 * torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    assert situ_glu(wild[0], wild[1], backend=backend).abs().max() <= TABLE["bound"]


@pytest.mark.row(55)
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_arguments(backend):
    """beta tanh(z / beta) - z is close to -z^3 / (3 beta^2) (report eq. 18), seen through the up branch."""
    for z, beta, difference, leading in TABLE["small_argument"]["rows"]:
        gate, up = torch.tensor([3.0, z], dtype=torch.float64)
        factor = situ_glu(gate, torch.tensor(1e-9, dtype=torch.float64), beta2=beta, backend=backend) / 1e-9
        bounded = situ_glu(gate, up, beta2=beta, backend=backend) / factor
        assert abs(float(bounded) - z - difference) < 1e-12
        assert abs(float(bounded) - z - leading) < 0.5 * z**5 / beta**4 + 1e-12


@pytest.mark.row(56)
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_betas_give_swiglu(backend):
    limit = TABLE["swiglu_limit"]
    g, u = (torch.tensor(limit[name], dtype=torch.float64) for name in "gu")
    assert abs(float(swiglu(g, u)) - limit["swiglu"]) < 1e-13
    for factor, y, gap in limit["rows"]:
        actual = float(situ_glu(g, u, 4 * factor, 25 * factor, backend=backend))
        assert abs(actual - y) < 1e-12
        assert abs(limit["swiglu"] - actual - gap) < 1e-12


@pytest.mark.row(57)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_against_autograd_and_against_a_clamp(backend):
    generator = torch.Generator().manual_seed(1)
    g, u = 4 * torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    args = (g.requires_grad_(), u.requires_grad_())
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, 3.0, 7.0, backend=backend), args)
    up = torch.tensor([40.0, -60.0], dtype=torch.float64, requires_grad=True)
    gate = torch.ones(2, dtype=torch.float64)
    (kept,) = torch.autograd.grad(situ_glu(gate, up, backend=backend).sum(), up)
    (clamped,) = torch.autograd.grad((F.silu(gate) * up.clamp(-25, 25)).sum(), up)
    assert (kept > 0).all()
    assert (clamped == 0).all()


def test_narrow_inputs_round_once():
    generator = torch.Generator().manual_seed(2)
    g, u = (3 * torch.randn(2, 64, 33, generator=generator)).bfloat16()
    d_out = torch.randn(64, 33, generator=generator).bfloat16()
    exact = situ_glu(g.double(), u.double(), backend="reference")
    for f in (situ_glu, lambda g, u: situ_glu(g, u, backend="reference")):
        leaves = g.clone().requires_grad_(), u.clone().requires_grad_()
        y = f(*leaves)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-30)
        grads = torch.autograd.grad(y, leaves, d_out)
        wide = g.double().requires_grad_(), u.double().requires_grad_()
        expected = torch.autograd.grad(situ_glu(*wide, backend="reference"), wide, d_out.double())
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_is_accurate_near_zero(backend):
    z = torch.logspace(-6, 0, 50)
    exact = situ_glu(z.double(), z.double(), backend="reference")
    torch.testing.assert_close(situ_glu(z, z, backend=backend).double(), exact, rtol=1e-6, atol=0)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"gate \(2, 3\) and up \(3,\)"):
        situ_glu(torch.ones(2, 3), torch.ones(3))


@pytest.mark.row(59)
@pytest.mark.parametrize("backend", BACKENDS)
def test_curves_of_figure_4(backend):
    """GLU x sigma(x), SwiGLU x^2 sigma(x) and SiTU-GLU with x in both branches, and where each of them goes."""

    def curves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return swiglu(x, torch.ones_like(x)), swiglu(x, x), situ_glu(x, x, backend=backend)

    x, *expected = columns(TABLE["scalar_curves"]["rows"])
    for actual, column in zip(curves(x), expected, strict=True):
        close(actual, column, 1e-13)
    x = torch.linspace(-60, 140, 4001, dtype=torch.float64)
    sigma = 1 / (1 + (-x).exp())
    glu, swi, situ = curves(x)
    close(glu, x * sigma, 1e-13)
    close(swi, x * x * sigma, 1e-13)
    close(situ, 100 * (x / 4).tanh() * (x / 25).tanh() * sigma, 1e-13)
    left, right = torch.tensor([[-60.0, -300.0], [300.0, 3000.0]], dtype=torch.float64)
    for curve, limit in zip(curves(right), (right, right**2, torch.full_like(right, 100)), strict=True):
        torch.testing.assert_close(curve, limit, rtol=1e-9, atol=0)
    assert all((curve.abs() < 1e-20).all() for curve in curves(left))
    hundred = torch.tensor(100.0, dtype=torch.float64)
    assert round(float(situ_glu(hundred, hundred, backend=backend)), 2) == 99.93
    right = x > 0.01
    rising = situ[right]
    assert (rising.diff() > 0).all() and rising.max() < 100 and (rising < swi[right]).all()


@pytest.mark.row(53)
@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_grows_without_bound_in_both_branches(backend):
    """Ten times the input is ten times the output by either branch, and a hundred times by both; SiTU stays in 100."""
    x, fixed = 50 * 10.0 ** torch.arange(5, dtype=torch.float64), torch.full((5,), 3.0, dtype=torch.float64)
    for gate, up, growth in ((x, fixed, 10), (fixed, x, 10), (x, x, 100), (x, -x, 100)):
        y = swiglu(gate, up)
        torch.testing.assert_close(y[1:] / y[:-1], torch.full((4,), float(growth), dtype=torch.float64))
        bounded = situ_glu(gate, up, backend=backend)
        assert bounded.abs().max() <= TABLE["bound"]
        torch.testing.assert_close(bounded[2:], bounded[2].expand(3))  # it has stopped growing
    generator = torch.Generator().manual_seed(0)
    x, w1, w3 = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((64, 32), (48, 32), (48, 32)))
    largest = [
        [float(f(x @ (s * w1).t(), x @ (s * w3).t()).abs().max()) for s in (1, 4, 16, 64)]
        for f in (swiglu, lambda g, u: situ_glu(g, u, backend=backend))
    ]
    assert all(14 < b / a < 20 for a, b in zip(largest[0], largest[0][1:], strict=False))  # weights times 4
    assert largest[0][-1] > 1e5 and max(largest[1]) <= TABLE["bound"]
