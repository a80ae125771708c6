"""The Triton backend of KDA: what it takes, and its gradients. `openk3.ops.kda` chooses it for CUDA tensors.

Bounds in `cu_seqlens`, offsets and slots are trusted: to read them would wait for the device.
Legend: T tokens, N sequences, H heads, K key and V value channels, S slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.kda import triton_launch as launch
from openk3.ops.kda.gate import BoundedGate
from openk3.ops.kda.triton_common import EPS
from openk3.ops.kda.triton_decode import step_kernel

WIDTHS = (64, 128)


def available() -> str | None:
    """None if the kernels can run here, else the reason (a phrase after "is not available: ")."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"it needs compute capability 8.0, this device has {major}.{minor}"


def takes(k: Tensor, v: Tensor, gate: BoundedGate | None) -> str | None:
    """None if the kernels take tensors of this kind, else the reason (likewise)."""
    K, V = k.shape[-1], v.shape[-1]
    if K != V or K not in WIDTHS:
        return f"it takes K = V in {WIDTHS}, got K = {K}, V = {V}"
    if k.dtype not in (torch.bfloat16, torch.float32):
        return f"it takes bfloat16 or float32, got {k.dtype}"
    if v.dtype != k.dtype:
        return f"it takes one dtype, got k in {k.dtype} and v in {v.dtype}"
    if gate is None:
        return "it takes a bounded gate only, since its tiles need a log decay of at least -5"
    return None


def _tokens(q, k, v, g, beta, gate: BoundedGate | None, scale: float | None) -> launch.Tokens:
    """Raises ValueError for what the kernels do not take; tensors without unit stride on the last axis are copied."""
    reason = takes(k, v, gate)
    if reason is not None or gate is None:
        raise ValueError(f"backend 'triton' of kda is not available: {reason}")
    for name, x in {"q": q, "v": v}.items():
        if x is not None and x.dtype != k.dtype:
            raise ValueError(f"backend 'triton' of kda needs one dtype, got k in {k.dtype} and {name} in {x.dtype}")
    dense = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, g)]
    A_log, dt_bias, lower_bound = gate
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    fields = [*dense, beta, A_log.contiguous(), dt_bias.contiguous(), lower_bound, scale]
    return launch.Tokens._make(fields)


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens, offsets, constants):
        lower_bound, scale, segments = constants
        x = launch.Tokens(q, k, v, g, beta, A_log, dt_bias, lower_bound, scale)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens, offsets)
        ctx.constants = lower_bound, scale
        ctx.set_materialize_grads(False)
        return launch.forward(x, cu_seqlens, start, offsets, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_final, d_states):
        *tokens, start, cu_seqlens, offsets = ctx.saved_tensors
        x = launch.Tokens(*tokens, *ctx.constants)
        if do is None:
            do = torch.zeros_like(x.v)
        d_states = None if offsets is None or d_states is None else d_states.contiguous()
        d_final = None if d_final is None else d_final.contiguous()
        gradients = launch.backward(x, cu_seqlens, start, offsets, do.contiguous(), d_final, d_states)
        d_A_log, d_dt_bias = gradients[5].to(x.A_log.dtype), gradients[6].to(x.dt_bias.dtype)
        d_start = None if start is None else gradients[7].to(start.dtype)
        return *gradients[:5], d_A_log, d_dt_bias, d_start, None, None, None


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Tensor,
    gate: BoundedGate | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    state_offsets: Tensor | Sequence[int] | None = None,
    segments: bool | None = None,
) -> tuple[Tensor, ...]:
    """As `openk3.ops.kda.kda`, for K = V in {64, 128} and a bounded gate; states in float32. First-order gradients.

    `segments`: True or False forces parallel segments on or off; None follows the table of `segment_rule`.
    """
    x = _tokens(q_THK, k_THK, v_THV, g_THK, beta_TH, gate, scale)
    start = None if initial_state is None else initial_state.contiguous()
    offsets = None
    if state_offsets is not None and len(state_offsets):
        offsets = torch.as_tensor(state_offsets, device=x.k.device).long()
    o, final, states = _Kda.apply(*x[:7], start, cu_seqlens, offsets, (x.lower_bound, x.scale, segments))
    if state_offsets is None:
        return o, final
    if offsets is not None:  # of equal offsets, the first in sorted order was written
        values, order = offsets.sort(stable=True)
        states = states.index_select(0, order[torch.searchsorted(values, offsets)])
    return o, final, states


def kda_segment(
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Tensor,
    gate: BoundedGate | None = None,
) -> tuple[Tensor, Tensor]:
    """As `openk3.ops.kda.kda_segment`: (M [N,H,K,K], S [N,H,K,V]) in float32, without gradients.

    Raises ValueError where a gradient would be expected.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (k_THK, v_THV, g_THK, beta_TH)):
        raise ValueError("backend 'triton' of kda_segment has no gradient: take backend 'torch', or detach the inputs")
    return launch.segment_maps(_tokens(None, k_THK, v_THV, g_THK, beta_TH, gate, 1.0), cu_seqlens)


@torch.no_grad()
def kda_step(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    *,
    state_SHKV: Tensor,
    slots_N: Tensor,
    gate: BoundedGate | None = None,
    scale: float | None = None,
    columns: int = 32,
    warps: int = 4,
) -> Tensor:
    """As `openk3.ops.kda.kda_step`: o [T,H,V]; `state_SHKV` in place. Slots below zero are skipped.

    `columns` and `warps` shape the launch: one setting for every batch size, so that a slot's bits depend on it alone.
    """
    x = _tokens(q_THK, k_THK, v_THV, g_THK, beta_TH, gate, scale)
    T, H, K, V = x.sizes
    N = slots_N.numel()
    if state_SHKV.stride()[2:] != (V, 1):
        raise ValueError(f"backend 'triton' of kda_step needs a dense [K, V] a head, got strides {state_SHKV.stride()}")
    o = torch.empty(T, H, V, dtype=x.v.dtype, device=x.v.device)
    strides = [s for y in (*x[:5], state_SHKV) if y is not None for s in y.stride()[:2]]
    arguments = [*x[:7], state_SHKV, slots_N, o, T // max(N, 1), H, *strides, x.scale, x.lower_bound]
    if T:
        constants = {"K": K, "V": V, "R": columns, "EPS": EPS, "num_warps": warps}
        step_kernel[(V // columns, H, N)](*arguments, **constants)
    return o
