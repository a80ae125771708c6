"""QK-clip: after a step, shrink the query and key weights of heads whose logits grew too large (report section 3.3).

Per head, S_max is the largest pre-softmax logit of the step and gamma = tau / S_max where S_max > tau. Content query
and key rows take sqrt(gamma) each; the 64 once-rotary query rows take gamma, because their key part is shared by all
heads and stays as it is (training.md section 3). KDA normalises its q and k and needs no clip.

A fused attention does not return its largest logit. The bound max |q| * max |k| costs two norms; only heads whose
bound exceeds tau are computed exactly.

Letters: T tokens, H heads, Q query width, D content width, R shared width.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openk3.model.mla import MLA

LOGITS_AT_ONCE = 1 << 24


class Seen(NamedTuple):
    """What one MLA layer showed of one micro-batch: queries, content keys, the shared key part."""

    layer: int
    q_THQ: Tensor
    k_nope_THD: Tensor
    k_pe_TR: Tensor
    scale: float
    cu_seqlens: Tensor

    def bound(self) -> Tensor:
        """[H]: no logit of a head is larger than this."""
        norm, wide = torch.linalg.vector_norm, torch.promote_types(self.q_THQ.dtype, torch.float32)
        k_TH = torch.hypot(norm(self.k_nope_THD, dim=-1, dtype=wide), norm(self.k_pe_TR, dim=-1, dtype=wide)[:, None])
        return norm(self.q_THQ, dim=-1, dtype=wide).amax(0) * k_TH.amax(0) * self.scale

    def largest(self, heads: Tensor) -> Tensor:
        """The largest causal logit of the given heads, exactly."""
        wide = torch.promote_types(self.q_THQ.dtype, torch.float32)
        k_pe_THR = self.k_pe_TR[:, None].expand(-1, len(heads), -1)
        k_THQ = torch.cat([self.k_nope_THD[:, heads], k_pe_THR], dim=-1).to(wide)
        return largest_logit(self.q_THQ[:, heads].to(wide), k_THQ, self.cu_seqlens, self.scale)


def largest_logit(q_THQ: Tensor, k_THQ: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """[H]: the largest causal logit of each head, over all sequences."""
    best_H = q_THQ.new_full((q_THQ.shape[1],), -torch.inf)
    bounds = cu_seqlens.tolist()
    for start, stop in zip(bounds, bounds[1:], strict=False):
        tile = max(1, LOGITS_AT_ONCE // max(1, (stop - start) * q_THQ.shape[1]))
        for top in range(start, stop, tile):
            end = min(top + tile, stop)
            q_HTQ, k_HTQ = q_THQ[top:end].transpose(0, 1), k_THQ[start:end].transpose(0, 1)
            logits_HTS = torch.bmm(q_HTQ, k_HTQ.mT) * scale
            future = torch.ones(end - top, end - start, dtype=torch.bool, device=q_THQ.device).triu(1 + top - start)
            best_H = torch.maximum(best_H, logits_HTS.masked_fill_(future, -torch.inf).amax((1, 2)))
    return best_H


@torch.no_grad()
def clip_heads(q_b: Tensor, kv_b: Tensor, gamma_H: Tensor, nope: int) -> None:
    """Scale the rows of both weights in place, q_b [H (nope + R), q rank] and kv_b [H (nope + V), latent].

    Heads with gamma = 1 keep their bits.
    """
    root_H11, gamma_H11 = gamma_H.sqrt()[:, None, None], gamma_H[:, None, None]
    q_HQX, kv_HCX = (w.view(len(gamma_H), -1, w.shape[-1]) for w in (q_b, kv_b))
    q_HQX[:, :nope] *= root_H11
    q_HQX[:, nope:] *= gamma_H11
    kv_HCX[:, :nope] *= root_H11


class QKClip:
    """Watches the MLA layers of a model and clips their weights after each step; tau = 0 does nothing."""

    def __init__(self, model: nn.Module, tau: float, group: dist.ProcessGroup | None = None):
        self.tau, self.group = tau, group
        self.layers = [m for m in model.modules() if isinstance(m, MLA)] if tau > 0 else []
        self.seen: list[Seen] = []
        self.exact_heads = 0  # heads whose bound asked for the exact maximum, since the start
        if self.layers:
            weight = self.layers[0].q_b_proj.weight
            self.largest_LH = weight.new_zeros(len(self.layers), self.layers[0].heads)
        for layer, module in enumerate(self.layers):
            module.observer = partial(self.observe, layer)

    def observe(
        self, layer: int, q_THQ: Tensor, k_nope_THD: Tensor, k_pe_TR: Tensor, scale: float, cu_seqlens: Tensor
    ) -> None:
        """Keep references only: the forward pass must not wait for the numbers."""
        self.seen.append(Seen(layer, q_THQ.detach(), k_nope_THD.detach(), k_pe_TR.detach(), scale, cu_seqlens))

    @torch.no_grad()
    def collect(self) -> None:
        """Close a micro-batch, after its backward: one look at all bounds, exact maxima where one exceeds tau."""
        if not self.seen:
            return
        bounds = torch.stack([seen.bound() for seen in self.seen])
        for seen, over_H in zip(self.seen, (bounds > self.tau).cpu(), strict=True):
            heads = over_H.nonzero().flatten().to(bounds.device)
            if len(heads):
                row_H = self.largest_LH[seen.layer]
                row_H[heads] = torch.maximum(row_H[heads], seen.largest(heads).to(row_H.dtype))
                self.exact_heads += len(heads)
        self.seen = []

    @torch.no_grad()
    def step(self) -> int:
        """Close a step: clip the heads over tau, forget the maxima. Returns how many heads were clipped."""
        if not self.layers:
            return 0
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.largest_LH, op=dist.ReduceOp.MAX, group=self.group)
        over_LH = self.largest_LH > self.tau
        clipped = int(over_LH.sum())
        if clipped:
            gamma_LH = torch.where(over_LH, self.tau / self.largest_LH, torch.ones_like(self.largest_LH))
            for module, gamma_H in zip(self.layers, gamma_LH, strict=True):
                clip_heads(module.q_b_proj.weight, module.kv_b_proj.weight, gamma_H, module.nope)
        self.largest_LH.zero_()
        return clipped
