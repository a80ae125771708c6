"""Kimi Delta Attention: a fast-weight memory with a decay of its own for every key channel (report section 2.1.1).

    S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t          (eq. 1)

Backends: `reference` (reference.py, token by token, the definition), `torch` (chunked.py, matrix products) and
`triton` (gpu.py, kernels for CUDA tensors with K = V in {64, 128} and a bounded gate; bounds, offsets and slots are
trusted there, since reading them would wait for the device). "auto" takes `torch`; `triton` is taken by its name.
Legend: T tokens, N sequences, H heads, K key and V value channels, S slots of a state pool.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from openk3.ops.dispatch import pick
from openk3.ops.kda.checks import check_pool, check_state, check_tokens, cut_offsets, sequence_bounds, slot_numbers
from openk3.ops.kda.chunked import kda_chunked
from openk3.ops.kda.gate import BoundedGate
from openk3.ops.kda.reference import kda_reference
from openk3.ops.kda.segments import AffineMap, compose, segment
from openk3.ops.kda.step import step_reference, step_torch

__all__ = ["BoundedGate", "compose", "kda", "kda_segment", "kda_step"]

WHOLE = {"reference": kda_reference, "torch": kda_chunked}
STEP = {"reference": step_reference, "torch": step_torch}


def _choose(op: str, backend: str, torch_forms: dict, k: Tensor, v: Tensor, gate: BoundedGate | None) -> Callable:
    """The implementation of `op`; that of `triton` stands in gpu.py under the op's own name."""
    kernels: Callable | str = "its kernels run on CUDA tensors"
    if k.is_cuda:
        try:
            from openk3.ops.kda import gpu  # Triton exists for Linux only
        except ImportError as error:
            kernels = f"triton does not import ({error})"
        else:
            kernels = gpu.available() or gpu.takes(k, v, gate) or getattr(gpu, op)
    return pick(op, backend, {**torch_forms, "triton": kernels}, "torch")


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
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """(o [T,H,V] in v's dtype, final state [N,H,K,V]); with `state_offsets` also the states there, [n,H,K,V].

    q, k are raw: the L2 norm (1e-6 on the sum of squares) is inside, then q is multiplied by `scale` (K^-0.5).
    With a `gate`, g and beta are logits; without one, g is the log decay (any value <= 0) and beta in [0, 1].
    `cu_seqlens` [N+1]; a sequence of length zero hands its state on. A state offset is a count of flat tokens: the
    state after token offset - 1 of the sequence that holds it; the chunk grid restarts there. States, and all
    arithmetic, in promote(dtype, float32). Differentiable in every tensor; first order only in `torch`.
    Raises ValueError for shapes, bounds, offsets or a backend that do not fit, TypeError for dtypes.
    """
    check_tokens(q_THK, k_THK, v_THV, g_THK, beta_TH, gate)
    (T, H, K), V = k_THK.shape, v_THV.shape[-1]
    check_state(initial_state, (cu_seqlens.numel() - 1, H, K, V))
    run = _choose("kda", backend, WHOLE, k_THK, v_THV, gate)
    if run not in WHOLE.values():
        more = {"scale": scale, "initial_state": initial_state, "state_offsets": state_offsets}
        return run(q_THK, k_THK, v_THV, g_THK, beta_TH, cu_seqlens=cu_seqlens, gate=gate, **more)
    bounds, offsets = sequence_bounds(cu_seqlens, T), cut_offsets(state_offsets, T)
    o_THV, final, states = run(
        q_THK,
        k_THK,
        v_THV,
        g_THK,
        beta_TH,
        bounds=bounds,
        offsets=offsets,
        gate=gate,
        scale=K**-0.5 if scale is None else scale,
        initial_state=initial_state,
    )
    return (o_THV, final) if state_offsets is None else (o_THV, final, states)


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
    backend: str = "auto",
) -> Tensor:
    """o [T,H,V] of T = N M tokens, M for each slot in turn; advances `state_SHKV` IN PLACE, without gradients.

    Slot -1 skips: its output rows are 0 and no state is read or written. Slots are distinct. Other arguments and
    arithmetic as in `kda`. Raises ValueError or TypeError as `kda` does, and for a slot out of range or named twice.
    """
    check_tokens(q_THK, k_THK, v_THV, g_THK, beta_TH, gate)
    check_pool(state_SHKV, k_THK, v_THV)
    (T, H, K), V = k_THK.shape, v_THV.shape[-1]
    run = _choose("kda_step", backend, STEP, k_THK, v_THV, gate)
    tokens, slots = (q_THK, k_THK, v_THV, g_THK, beta_TH), slots_N.long()
    if run not in STEP.values():
        return run(*tokens, state_SHKV=state_SHKV, slots_N=slots, gate=gate, scale=scale)
    numbers = slot_numbers(slots_N, len(state_SHKV), T)
    live = [n for n, s in enumerate(numbers) if s != -1]
    if T == 0 or not live:
        return v_THV.new_zeros(T, H, V)
    whole = len(live) == len(numbers)
    if not whole:
        kept = torch.tensor(live, device=slots.device)
        tokens = tuple(x.unflatten(0, (len(numbers), -1)).index_select(0, kept).flatten(0, 1) for x in tokens)
        slots = slots.index_select(0, kept)
    o = run(*tokens, state_SHKV=state_SHKV, slots=slots, gate=gate, scale=K**-0.5 if scale is None else scale)
    o = o.to(v_THV.dtype)
    if whole:
        return o
    out = v_THV.new_zeros(len(numbers), T // len(numbers), H, V)
    return out.index_copy_(0, kept, o.view(len(live), -1, H, V)).view(T, H, V)


def kda_segment(
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Tensor,
    gate: BoundedGate | None = None,
    backend: str = "auto",
) -> AffineMap:
    """(M [N,H,K,K], S [N,H,K,V]): each segment maps a state S_in to M S_in + S. Differentiable; errors as in `kda`."""
    check_tokens(None, k_THK, v_THV, g_THK, beta_TH, gate)
    run = _choose("kda_segment", backend, WHOLE, k_THK, v_THV, gate)
    if run not in WHOLE.values():
        return run(k_THK, v_THV, g_THK, beta_TH, cu_seqlens=cu_seqlens, gate=gate)
    bounds = sequence_bounds(cu_seqlens, len(k_THK))

    def states(v: Tensor, initial_state: Tensor) -> tuple:
        return run(
            None,
            k_THK,
            v,
            g_THK,
            beta_TH,
            bounds=bounds,
            offsets=(),
            gate=gate,
            scale=1.0,
            initial_state=initial_state,
        )

    return segment(states, v_THV, len(bounds) - 1, k_THK.shape[-1])
