"""MXFP4 and MXFP8: golden codes, every code and scale and midpoint, exact rational rounding, another library."""

from collections.abc import Callable
from fractions import Fraction
from math import inf, ldexp, nan

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from openk3.ops import mx
from openk3.ops.mx import dequantize_mxfp4, dequantize_mxfp8, fake_quantize, quantize_mxfp4, quantize_mxfp8

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
RULES = ["floor", "ceil"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
UNSCALED = 127  # the byte of scale 1
LAST = 252  # beyond this byte 6 scales exceed float32


def groups(values: list[float] | Tensor, dtype: torch.dtype = torch.float64, anchor: float = 0.0) -> Tensor:
    """One group a value: it and 31 zeros, the first of which is `anchor`."""
    x = torch.zeros(len(values), 32, dtype=dtype)
    x[:, 0], x[:, 1] = torch.as_tensor(values, dtype=dtype), anchor
    return x


def codes_of(packed: Tensor) -> Tensor:
    return torch.stack([packed % 16, packed // 16], dim=-1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    return codes[..., 0::2] + 16 * codes[..., 1::2]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@pytest.mark.row(106)
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_codes(golden: Callable, dtype: torch.dtype) -> None:
    case = golden("mxfp4_codes")
    table = torch.tensor([row["value"] for row in case["codes"]], dtype=dtype)
    every = torch.tensor([row["code"] for row in case["codes"]], dtype=torch.uint8).repeat(2)
    assert [f"{row['code']:04b}" for row in case["codes"]] == [row["bits"] for row in case["codes"]]
    one = torch.tensor([UNSCALED], dtype=torch.uint8)
    assert same_bits(dequantize_mxfp4(pack(every), one, dtype), table.repeat(2))
    for byte, exponent, scale in case["scales"]["rows"]:
        assert scale == ldexp(1.0, exponent)
        ones = dequantize_mxfp4(pack(torch.full_like(every, 2)), torch.tensor([byte], dtype=torch.uint8), dtype)
        assert (ones.double() == scale).all()
    for row in case["byte_pair_examples"]:
        values = dequantize_mxfp4(torch.full((16,), row["byte"], dtype=torch.uint8), one, dtype)
        assert ", ".join(map(str, values[:2].tolist())) == row["values"]
    for sign in (1, -1):
        for magnitude, code, value in case["ties"]["rows"]:
            packed, scales = quantize_mxfp4(groups([sign * magnitude], dtype, anchor=6.0))
            assert scales.item() == UNSCALED and codes_of(packed)[0, 0] == code + 8 * (sign < 0)
            assert dequantize_mxfp4(packed, scales, dtype)[0, 0] == sign * value
        for x, byte, code, value in case["saturation"]["rows"]:
            x = 7.96875 if (x, dtype) == (7.99, torch.bfloat16) else x  # bfloat16 would round 7.99 up to 8
            packed, scales = quantize_mxfp4(groups([sign * x], dtype))
            assert scales.item() == byte and codes_of(packed)[0, 0] == code + 8 * (sign < 0)
            assert dequantize_mxfp4(packed, scales, dtype)[0, 0] == sign * value


@pytest.mark.row(106)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_matrix(golden: Callable, dtype: torch.dtype) -> None:
    case = golden("mxfp4_codes")["example_2x64"]
    weight = torch.tensor(case["weight"], dtype=dtype)
    packed, scales = quantize_mxfp4(weight)
    assert codes_of(packed).tolist() == case["codes"]
    assert packed.tolist() == case["weight_packed"]
    assert scales.tolist() == case["weight_scale"]
    assert packed[0, :8].tolist() != case["high_nibble_first_would_give"]
    for out in DTYPES:
        assert dequantize_mxfp4(packed, scales, out).double().tolist() == case["decoded"]


@pytest.mark.row(106)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_codes_at_all_scales(dtype: torch.dtype) -> None:
    """16 codes and 255 scales, decoded and encoded again; 6 is among them, so codes and bytes come back as well."""
    scales = torch.arange(255 if dtype == torch.float64 else LAST + 1, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 2)
    values = dequantize_mxfp4(pack(codes), scales, dtype)
    signed = E2M1 + [-value for value in E2M1]
    exact = [[ldexp(value, s - 127) for value in signed] * 2 for s in range(len(scales))]
    assert same_bits(values.double(), torch.tensor(exact, dtype=torch.float64))
    for rule in RULES:
        packed, again = quantize_mxfp4(values, rule)
        assert torch.equal(codes_of(packed), codes) and torch.equal(again, scales)


@given(st.lists(st.integers(0, 15), min_size=32, max_size=32), st.integers(0, 252), st.sampled_from(RULES))
def test_encoding_is_exact_for_what_was_decoded(codes: list[int], scale: int, rule: str) -> None:
    """Also where the largest code is small, so that another scale is chosen."""
    stored = pack(torch.tensor([codes], dtype=torch.uint8)), torch.tensor([[scale]], dtype=torch.uint8)
    for dtype in DTYPES:
        values = dequantize_mxfp4(*stored, dtype)
        assert same_bits(dequantize_mxfp4(*quantize_mxfp4(values, rule), dtype), values)


def beside(x: Tensor, towards: float) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, towards))


@pytest.mark.row(106)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_of_mxfp4(dtype: torch.dtype, rule: str, sign: int) -> None:
    """A midpoint goes to the even code; the next number on either side goes to its own neighbour."""
    low = torch.arange(7)
    middle = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)], dtype=torch.float64)
    for scale in [0, 1, 2, 30, 126, 127, 128, 200, 251, LAST]:
        at = (middle * ldexp(1.0, scale - 127)).to(dtype)
        cases = (at, low + low % 2), (beside(at, 0), low), (beside(at, inf), low + 1)
        for x, expected in cases:
            packed, scales = quantize_mxfp4(groups(sign * x, dtype, anchor=ldexp(6.0, scale - 127)), rule)
            assert (scales == scale).all()
            assert codes_of(packed)[:, 0].tolist() == (expected + 8 * (sign < 0)).tolist()


@pytest.mark.row(106)
def test_scale_rules() -> None:
    """By exact arithmetic, at the numbers where a logarithm rounds: next to 2^k and next to 1.5 2^k = 6 scales."""
    edges = torch.tensor([1.0, 1.5], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        for k in (-140, -126, -125, -124, -123, -100, -1, 0, 1, 2, 3, 100, 126, 127):
            at = (edges * ldexp(1.0, k)).to(dtype)
            for amax in (at, beside(at, 0), beside(at, inf)):
                found = {rule: quantize_mxfp4(groups(-amax, dtype), rule)[1].flatten().tolist() for rule in RULES}
                found["mxfp8"] = quantize_mxfp8(groups(-amax, dtype))[1].flatten().tolist()
                for name, bytes_ in found.items():
                    assert bytes_ == [rational_scale(Fraction(value), name) + 127 for value in amax.tolist()]
    packed, scales = quantize_mxfp4(groups([6.1, 6.1]), "floor")
    assert scales.flatten().tolist() == [127, 127] and codes_of(packed)[0, 0] == 7  # 6.1 scales saturate
    packed, scales = quantize_mxfp4(groups([6.1, 6.1]), "ceil")
    assert scales.flatten().tolist() == [128, 128] and codes_of(packed)[0, 0] == 5  # 3.05 scales do not
    for byte in (quantize_mxfp4(torch.zeros(1, 32))[1], quantize_mxfp8(torch.zeros(1, 32))[1]):
        assert byte.item() == 0
    huge = groups([1e300])  # beyond the largest scale, where only float64 gets
    assert [int(t[0, 0]) for t in quantize_mxfp4(huge)] == [7, 254]
    assert [float(t[0, 0].double()) for t in quantize_mxfp8(huge)] == [448, 254]


def rational_scale(amax: Fraction, name: str) -> int:
    """Exponent of the scale, in [-127, 127]."""
    for e in range(-127, 127):
        if name == "ceil" and amax <= 6 * Fraction(2) ** e:
            return e
        if name != "ceil" and amax < Fraction(2) ** (e + (9 if name == "mxfp8" else 3)):
            return e
    return 127


def nearest(x: Fraction, grid: list[float]) -> int:
    """Code of the nearest magnitude; of two, the even one."""
    return min(range(len(grid)), key=lambda c: (abs(abs(x) - Fraction(grid[c])), c % 2))


@pytest.mark.row(106)
@given(
    st.integers(-170, 120).flatmap(
        lambda k: st.lists(
            st.floats(-1, 1, width=32).map(lambda m: m * 2.0**k) | st.sampled_from([0.0, -0.0]),
            min_size=32,
            max_size=32,
        )
    ),
    st.sampled_from(DTYPES),
    st.sampled_from([*RULES, "mxfp8"]),
)
@example([17 + 2.0**-40, 448.0, *[0.0] * 30], torch.float64, "mxfp8")  # through float32 this would round twice
@example([0.25 + 2.0**-40, 6.0, *[0.0] * 30], torch.float64, "floor")
@example([2.0**-127, 2.0**-133, -(2.0**-128), *[0.0] * 29], torch.bfloat16, "floor")
def test_rounds_to_the_nearest_by_rational_arithmetic(values: list[float], dtype: torch.dtype, name: str) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    if name == "mxfp8":
        elements, scales = quantize_mxfp8(x)
        codes, sign, grid = elements.view(torch.uint8), 128, E4M3
        decoded = dequantize_mxfp8(elements, scales, torch.float64)
    else:
        packed, scales = quantize_mxfp4(x, name)
        codes, sign, grid = codes_of(packed), 8, E2M1
        decoded = dequantize_mxfp4(packed, scales, torch.float64)
    numbers = [Fraction(value) for value in x.tolist()]
    e = rational_scale(max(map(abs, numbers)), name)
    assert scales.tolist() == [e + 127]
    expected = [nearest(number / Fraction(2) ** e, grid) for number in numbers]
    assert (codes % sign).tolist() == expected
    assert (codes >= sign).tolist() == x.signbit().tolist()
    assert decoded.abs().tolist() == [ldexp(grid[c], e) for c in expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_values_of_mxfp8(dtype: torch.dtype) -> None:
    """254 finite codes. Encoded again in groups with 448 they come back bit for bit."""
    finite = torch.tensor([c for c in range(256) if c % 128 < 127], dtype=torch.uint8)
    rows = torch.stack([finite[:127], finite[127:]]).unfold(1, 31, 31).flatten(0, 1)  # rows of 31, without the last
    rows = torch.cat([rows, torch.stack([*finite[124:127], *finite[-3:], *finite[:25]])[None]])
    assert set(rows.flatten().tolist()) == set(finite.tolist())
    codes = torch.cat([rows, torch.full_like(rows[:, :1], 126)], dim=1)
    for scale in [0, 1, 2, 5, 6, 60, 126, 127, 128, 200, 246] + [254] * (dtype == torch.float64):
        scales = torch.full((len(codes), 1), scale, dtype=torch.uint8)
        values = dequantize_mxfp8(codes.view(torch.float8_e4m3fn), scales, dtype)
        exact = torch.tensor([E4M3[c % 128] * (1 if c < 128 else -1) for c in codes.flatten().tolist()])
        exact = exact.double().view(codes.shape) * ldexp(1.0, scale - 127)
        assert same_bits(values, exact.to(dtype))
        if torch.equal(values.double(), exact):  # all but the smallest in bfloat16
            elements, again = quantize_mxfp8(values)
            assert torch.equal(elements.view(torch.uint8), codes) and torch.equal(again, scales)
    assert dtype != torch.bfloat16 or scale == 246


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_and_saturation_of_mxfp8(dtype: torch.dtype, sign: int) -> None:
    low = torch.arange(126)
    middle = torch.tensor([(a + b) / 2 for a, b in zip(E4M3, E4M3[1:], strict=False)], dtype=torch.float64)
    for scale in [0, 1, 30, 127, 200, 246]:
        at = (middle * ldexp(1.0, scale - 127)).to(dtype)
        for x, expected in ((at, low + low % 2), (beside(at, 0), low), (beside(at, inf), low + 1)):
            elements, scales = quantize_mxfp8(groups(sign * x, dtype, anchor=ldexp(448.0, scale - 127)))
            assert (scales == scale).all()
            assert elements.view(torch.uint8)[:, 0].tolist() == (expected + 128 * (sign < 0)).tolist()
    x = groups([448, 449, 464, 480, 511.9], dtype) * sign  # plain rounding would make NaN of those above 464
    elements, scales = quantize_mxfp8(x)
    assert (scales == UNSCALED).all() and (elements.double()[:, 0] == 448 * sign).all()


@pytest.fixture(scope="module")
def torchao():
    """(MXTensor.to_mx, its scale rules); skipped where the library is not installed."""
    tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    return tensor.MXTensor.to_mx, tensor.ScaleCalculationMode


@pytest.mark.row(106)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_torchao(torchao, dtype: torch.dtype) -> None:
    """Its mode FLOOR is our "floor", its RCEIL our "ceil"; its CEIL and EVEN are other rules.

    Only above byte 0: there it divides by 2^-126 and stores 2^-127. And its RCEIL takes a float32 logarithm.
    """
    to_mx, modes = torchao
    exponents = torch.randint(-118, 120, (512, 4, 1), generator=torch.Generator().manual_seed(0)).float()
    spread = torch.randn(512, 4, 32, generator=torch.Generator().manual_seed(1))
    x = (spread * torch.exp2(exponents)).flatten(1).to(dtype)
    for rule, mode in zip(RULES, (modes.FLOOR, modes.RCEIL), strict=True):
        theirs = to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
        packed, scales = quantize_mxfp4(x, rule)
        assert torch.equal(scales, theirs.scale.view(torch.uint8)) and torch.equal(packed, theirs.qdata)
        assert same_bits(dequantize_mxfp4(packed, scales, dtype), theirs.dequantize(dtype))
    theirs = to_mx(x, torch.float8_e4m3fn, 32, modes.FLOOR)
    elements, scales = quantize_mxfp8(x)
    assert torch.equal(scales, theirs.scale.view(torch.uint8))
    assert torch.equal(elements.view(torch.uint8), theirs.qdata.view(torch.uint8))
    assert same_bits(dequantize_mxfp8(elements, scales, dtype), theirs.dequantize(dtype))
    for mode in (modes.CEIL, modes.EVEN):
        other = to_mx(x, torch.float4_e2m1fn_x2, 32, mode).scale.view(torch.uint8)
        assert all((quantize_mxfp4(x, rule)[1] != other).any() for rule in RULES)


@pytest.mark.row(106)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "rule"), [("mxfp4", "floor"), ("mxfp4", "ceil"), ("mxfp8", "floor")])
def test_fake_quantize_is_the_round_trip_with_a_gradient_straight_through(dtype, format, rule) -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = fake_quantize(x, format, rule)
    if format == "mxfp4":
        expected = dequantize_mxfp4(*quantize_mxfp4(x.detach(), rule), dtype)
    else:
        expected = dequantize_mxfp8(*quantize_mxfp8(x.detach()), dtype)
    assert same_bits(y.detach(), expected) and not torch.equal(y, x)
    assert same_bits(fake_quantize(y.detach(), format, rule), y.detach())  # nothing more is lost
    error = (y - x).detach().double().norm() / x.detach().double().norm()
    assert error < (0.15 if format == "mxfp4" else 0.04)
    d_out = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    (gradient,) = torch.autograd.grad(y, x, d_out)
    assert same_bits(gradient, d_out)  # the saturated ones included


@pytest.mark.row(106)
def test_a_master_learns_through_quantised_values() -> None:
    """Steps too small to move a code add up in the float32 master, until the code moves."""
    master = torch.full((32,), 1.0, requires_grad=True)
    optimizer = torch.optim.SGD([master], lr=0.01)
    seen = []
    for _ in range(60):
        values = fake_quantize(master, "mxfp4")
        optimizer.zero_grad()
        values.sum().backward()
        optimizer.step()
        seen.append(values[0].item())
    assert seen[0] == 1.0 and sorted(set(seen), reverse=True) == [1.0, 0.75, 0.5, 0.375]
    assert seen == sorted(seen, reverse=True)


def test_any_leading_dimensions_strides_and_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 3, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = *quantize_mxfp4(x), *quantize_mxfp8(x)
    monkeypatch.setattr(mx, "PIECE", 4)
    again = *quantize_mxfp4(x), *quantize_mxfp8(x)
    for a, b, shape in zip(whole, again, ((5, 3, 48), (5, 3, 3), (5, 3, 96), (5, 3, 3)), strict=True):
        assert a.shape == shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(dequantize_mxfp4(*whole[:2])[4, 2], dequantize_mxfp4(whole[0][4, 2], whole[1][4, 2]))
    turned = x.transpose(0, 1)
    for f in (quantize_mxfp4, quantize_mxfp8):
        for a, b in zip(f(turned), f(turned.contiguous()), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    packed, scales = quantize_mxfp4(torch.zeros(0, 64))
    assert packed.shape == (0, 32) and scales.shape == (0, 2) and dequantize_mxfp4(packed, scales).shape == (0, 64)


def test_the_smallest_scale_survives_where_subnormals_are_flushed() -> None:
    scales = torch.zeros(1, 1, dtype=torch.uint8)
    packed = pack(torch.arange(16, dtype=torch.uint8).repeat(1, 2))
    want = dequantize_mxfp4(packed, scales, torch.float32), dequantize_mxfp4(packed, scales, torch.bfloat16)
    bits = [want[0].view(torch.int32), want[1].view(torch.int16)]
    assert bits[0][0, 1].item() == 1 << 21  # 0.5 times 2^-127 = 2^-128
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert (torch.tensor(2.0**-126) * 0.5).view(torch.int32) == 0  # they are flushed
        assert torch.equal(dequantize_mxfp4(packed, scales, torch.float32).view(torch.int32), bits[0])
        assert torch.equal(dequantize_mxfp4(packed, scales, torch.bfloat16).view(torch.int16), bits[1])
        assert torch.equal(quantize_mxfp4(want[0])[0], packed)
    finally:
        torch.set_flush_denormal(False)


def test_refusals() -> None:
    for f in (quantize_mxfp4, quantize_mxfp8, lambda x: fake_quantize(x, "mxfp4")):
        for x in (torch.ones(2, 48), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=r"the last dimension of \(.*\) is not a multiple of 32"):
                f(x)
        for value in (nan, inf, -inf):
            for dtype in DTYPES:
                with pytest.raises(ValueError, match="x has a value that is not finite"):
                    f(groups([1.0, value], dtype))
        for dtype in (torch.int64, torch.float16, torch.float8_e4m3fn):
            with pytest.raises(ValueError, match=rf"dtype {dtype} is none of torch.bfloat16, torch.float32, torch"):
                f(torch.ones(32).to(dtype))
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="rule = 'round' is none of 'floor', 'ceil'"):
        quantize_mxfp4(x, "round")
    with pytest.raises(ValueError, match="format = 'nvfp4' is none of 'mxfp4', 'mxfp8'"):
        fake_quantize(x, "nvfp4")
    with pytest.raises(ValueError, match="rule = 'ceil': mxfp8 has the rule 'floor' alone"):
        fake_quantize(x, "mxfp8", "ceil")


@pytest.mark.parametrize("dtype", DTYPES)
def test_refusals_of_what_is_stored(dtype: torch.dtype) -> None:
    x = torch.ones(2, 64)
    for quantise, dequantise in ((quantize_mxfp4, dequantize_mxfp4), (quantize_mxfp8, dequantize_mxfp8)):
        stored, scales = quantise(x)
        bad = scales.clone()
        bad[1, 0] = 255
        with pytest.raises(ValueError, match="a scale byte is 255, which is not a number"):
            dequantise(stored, bad, dtype)
        for pair in ((stored, scales.to(torch.int16)), (stored.view(torch.int8), scales)):
            with pytest.raises(ValueError, match="must be"):
                dequantise(*pair, dtype)
        for pair in ((stored[:, :-1], scales), (stored, scales[:, :1]), (stored[:1], scales), (stored, scales[0])):
            with pytest.raises(ValueError, match="share a scale"):
                dequantise(*pair, dtype)
        with pytest.raises(ValueError, match="dtype torch.float16 is none of"):
            dequantise(stored, scales, torch.float16)
        if dtype != torch.float64:
            with pytest.raises(ValueError, match=f"a value exceeds {dtype}"):
                dequantise(quantise(x * 6)[0], torch.full_like(scales, 254), dtype)
    elements, scales = quantize_mxfp8(x)
    elements.view(torch.uint8)[0, 3] = 127
    with pytest.raises(ValueError, match="an E4M3 element is not a number"):
        dequantize_mxfp8(elements, scales, dtype)
