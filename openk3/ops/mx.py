"""MXFP4 and MXFP8: small floats that share one power-of-two scale among 32 inputs (model.md section 12).

An element is E2M1 (4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign) or E4M3 (8 bits, up to 448). Scale byte s stands for
2^(s - 127). The encoder works on the bits of its input as integers, so that no logarithm rounds, nothing is rounded
twice, and a subnormal is a number like any other; the decoder looks every value up in a table, so that 2^-127, itself
a float32 subnormal, survives where arithmetic flushes those to zero.
Shapes: I inputs, a multiple of 32; G = I / 32 groups. Any leading dimensions.
"""

from __future__ import annotations

from functools import cache
from math import ldexp
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32
NAN_SCALE = 255  # of the scale bytes the one that is not a number
PIECE = 1 << 12  # groups that a CPU takes at a time


class _Element(NamedTuple):
    """A small float by its fields. Magnitude code c counts its values upwards from 0."""

    name: str
    mantissa: int  # bits behind the leading one
    lowest: int  # exponent of the smallest normal value; below it the steps stay as wide
    top: int  # exponent of the largest value
    largest: int  # magnitude code of the largest value
    sign: int  # bit of the sign

    def values(self) -> list[float]:
        """What the codes stand for, without the sign, in float64."""
        steps = 1 << self.mantissa
        powers = [(c % steps + steps * (c >= steps), max(c // steps, 1) - 1) for c in range(self.largest + 1)]
        return [ldexp(significand, self.lowest + power - self.mantissa) for significand, power in powers]


_E2M1 = _Element("E2M1", mantissa=1, lowest=0, top=2, largest=7, sign=3)
_E4M3 = _Element("E4M3", mantissa=3, lowest=-6, top=8, largest=126, sign=7)


class _Bits(NamedTuple):
    """Where a wide float keeps its exponent."""

    integer: torch.dtype
    fraction: int
    bias: int


_WIDE = {torch.float32: _Bits(torch.int32, 23, 127), torch.float64: _Bits(torch.int64, 52, 1023)}
_INPUTS = (torch.bfloat16, torch.float32, torch.float64)


def quantize_mxfp4(x: Tensor, rule: str = "floor") -> tuple[Tensor, Tensor]:
    """x [..., I] as (packed uint8 [..., I/2], scales uint8 [..., I/32]), the released layout of routed experts.

    Byte c holds element 2c in its low nibble and 2c + 1 in its high one. Nearest code, ties to the even one; a zero
    keeps its sign. Scale exponent, clamped to [-127, 127]: rule "floor" is floor(log2 amax) - 2, where magnitudes above
    6 scales become 6; rule "ceil" is ceil(log2(amax / 6)), where none has to. A group of zeros has byte 0.
    Raises ValueError unless x is finite, bfloat16, float32 or float64, and I a multiple of 32, or for another rule.
    """
    if rule not in ("floor", "ceil"):
        raise ValueError(f"rule = {rule!r} is none of 'floor', 'ceil'")
    codes, scales = _encode(x, _E2M1, rule)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def dequantize_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What `quantize_mxfp4` packed: [..., I] in dtype, exact as far as dtype reaches.

    Raises ValueError for tensors that are not uint8 of shapes [..., 16 G] and [..., G], for scale byte 255 (NaN), and
    for a value that is too large for dtype (only scale bytes above 252 have such).
    """
    _check_stored(packed, torch.uint8, scales, BLOCK // 2, dtype)
    return _decode(torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2), scales, _E2M1, dtype)


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., I] as (elements float8_e4m3fn [..., I], scales uint8 [..., I/32]), the inputs of routed experts.

    Scale exponent floor(log2 amax) - 8, clamped to [-127, 127]; nearest value, ties to the even code, magnitudes above
    448 scales become 448. Raises ValueError unless x is finite, bfloat16, float32 or float64, and I a multiple of 32.
    """
    codes, scales = _encode(x, _E4M3, "floor")
    return codes.view(torch.float8_e4m3fn), scales


def dequantize_mxfp8(elements: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What `quantize_mxfp8` made: [..., I] in dtype, rounded once where dtype's subnormals are too coarse.

    Raises ValueError for another dtype than float8_e4m3fn and uint8, shapes other than [..., 32 G] and [..., G], a NaN
    among the elements, scale byte 255 (NaN), and a value that is too large for dtype.
    """
    _check_stored(elements, torch.float8_e4m3fn, scales, BLOCK, dtype)
    return _decode(elements.view(torch.uint8), scales, _E4M3, dtype)


def fake_quantize(x: Tensor, format: str, rule: str = "floor") -> Tensor:
    """x [..., I] as it comes back from format "mxfp4" or "mxfp8", in x.dtype; the gradient passes straight through.

    Training sees the very values that serving does. Raises ValueError for another format, for a rule other than "floor"
    with "mxfp8", and where quantising does.
    """
    if format not in ("mxfp4", "mxfp8"):
        raise ValueError(f"format = {format!r} is none of 'mxfp4', 'mxfp8'")
    if format == "mxfp8" and rule != "floor":
        raise ValueError(f"rule = {rule!r}: mxfp8 has the rule 'floor' alone")
    return _FakeQuantize.apply(x, format, rule)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, format, rule):
        if format == "mxfp4":
            return dequantize_mxfp4(*quantize_mxfp4(x, rule), dtype=x.dtype)
        return dequantize_mxfp8(*quantize_mxfp8(x), dtype=x.dtype)

    @staticmethod
    def backward(ctx, d_out):
        return d_out, None, None


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows of a group each; on a CPU in portions whose temporaries stay in the cache, which is several times faster."""
    return rows.split(PIECE if rows.device.type == "cpu" else max(len(rows), 1))


def _encode(x: Tensor, element: _Element, rule: str) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., I] with the sign in its bit, and scale bytes [..., G]."""
    if x.dtype not in _INPUTS:
        raise ValueError(f"dtype {x.dtype} is none of {', '.join(map(str, _INPUTS))}")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension of {tuple(x.shape)} is not a multiple of {BLOCK}")
    pieces = [_encode_groups(piece, element, rule) for piece in _pieces(x.reshape(-1, BLOCK))]
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return codes.view(x.shape), scales.view(*x.shape[:-1], x.shape[-1] // BLOCK)


def _encode_groups(x_GB: Tensor, element: _Element, rule: str) -> tuple[Tensor, Tensor]:
    """Codes [G, 32] and scale bytes [G, 1], both uint8."""
    wide = x_GB if x_GB.dtype == torch.float64 else x_GB.float()
    integer, fraction, bias = _WIDE[wide.dtype]
    bits = wide.view(integer)
    magnitude = bits & torch.iinfo(integer).max
    amax = magnitude.amax(-1, keepdim=True)  # magnitudes of floats are in the order of their bits
    if (amax >> fraction > 2 * bias).any():
        raise ValueError("x has a value that is not finite")
    # Up to 1.5 2^k, six scales of 2^(k - 2) suffice; the sum carries into the exponent for a fraction above a half.
    carry = (1 << (fraction - 1)) - 1 if rule == "ceil" else 0
    scale = ((amax + carry >> fraction) + (127 - bias - element.top)).clamp_(0, NAN_SCALE - 1)

    # |x| / scale = significand 2^(exponent - fraction); a subnormal has no leading one, but the exponent of 1.
    exponent = magnitude >> fraction
    significand = magnitude & (1 << fraction) - 1 | (exponent > 0).to(integer) << fraction
    exponent = exponent.clamp_(min=1).sub_(scale + (bias - 127))
    leading = (significand.to(wide.dtype).view(integer) >> fraction).sub_(bias + fraction)  # 0 but for subnormals
    kept = leading.add_(exponent).clamp_(min=element.lowest)  # exponent of the code: its steps are 2^(kept - mantissa)
    # From fraction + 2 on less than half a step is left, which rounds to zero.
    shift = (kept - exponent).add_(fraction - element.mantissa).clamp_(max=fraction + 2)
    half = torch.ones_like(shift).bitwise_left_shift_(shift - 1)
    odd = significand >> shift & 1
    steps = significand.add_(half).add_(odd).sub_(1) >> shift
    code = steps.add_(kept.sub_(element.lowest).bitwise_left_shift_(element.mantissa)).clamp_(max=element.largest)
    code |= (bits < 0).to(integer) << element.sign
    return code.to(torch.uint8), scale.to(torch.uint8)


def _check_stored(stored: Tensor, kind: torch.dtype, scales: Tensor, per_group: int, dtype: torch.dtype) -> None:
    if dtype not in _INPUTS:
        raise ValueError(f"dtype {dtype} is none of {', '.join(map(str, _INPUTS))}")
    if stored.dtype != kind or scales.dtype != torch.uint8:
        raise ValueError(f"dtypes {stored.dtype} and {scales.dtype} must be {kind} and {torch.uint8}")
    if stored.dim() == 0 or stored.shape != (*scales.shape[:-1], per_group * scales.shape[-1]):
        raise ValueError(f"{tuple(stored.shape)} elements and {tuple(scales.shape)} scales: {per_group} share a scale")


@cache
def _table(element: _Element, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every value there is, at 2^(sign + 1) scale + code: NaN where a scale or an element is, inf beyond dtype."""
    with torch.inference_mode(False):
        values = element.values()
        values += [float("nan")] * ((1 << element.sign) - len(values))
        values += [-value for value in values]
        scales = [ldexp(1.0, s - 127) for s in range(NAN_SCALE)] + [float("nan")]
        table = torch.outer(torch.tensor(scales, dtype=torch.float64), torch.tensor(values, dtype=torch.float64))
        return table.flatten().to(dtype).to(device)


def _decode(codes: Tensor, scales: Tensor, element: _Element, dtype: torch.dtype) -> Tensor:
    """Values [..., I] of codes uint8 [..., I], by the table."""
    table = _table(element, dtype, codes.device)
    pieces = []
    for codes_GB, scales_G1 in zip(_pieces(codes.reshape(-1, BLOCK)), _pieces(scales.reshape(-1, 1)), strict=True):
        index = codes_GB.int().add_(scales_G1.int() << (element.sign + 1))
        values = table.index_select(0, index.flatten())
        if not values.isfinite().all():
            raise ValueError(_why_not_finite(values, scales_G1, element))
        pieces.append(values)
    return torch.cat(pieces).view(codes.shape)


def _why_not_finite(values: Tensor, scales: Tensor, element: _Element) -> str:
    if (scales == NAN_SCALE).any():
        return f"a scale byte is {NAN_SCALE}, which is not a number"
    return f"an {element.name} element is not a number" if values.isnan().any() else f"a value exceeds {values.dtype}"
