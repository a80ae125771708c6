"""Multi-head latent attention without positions (report section 2.1.2; model.md section 6; kernels.md section 15).

Per token only a row [latent (normed) | k_pe] is stored, shared by all heads; k_pe is never rotated. Two exact forms:
expanded (keys and values made from the rows) and absorbed (queries taken into the latent space).
Shapes: T tokens, N sequences, H heads, Q query and key width (nope + R), V value width, L latent, R shared key part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.attention import attend_blocked
from openk3.ops.dispatch import pick

LONG = 256  # mean keys a query sits before, from where blocks beat the fused kernel on a CPU (benchmarks/ops_cpu.py)


class KVView(NamedTuple):
    """One MLA layer's stored rows, by pages: pool [P, page, L + R], table int [N, pages], lengths int32 [N].

    `lengths` are the tokens stored before this call.
    """

    pool: Tensor
    table: Tensor
    lengths: Tensor

    @torch.no_grad()
    def append(self, rows: Tensor, cu_seqlens: Tensor) -> None:
        """Write rows [T, L + R] behind what each sequence has stored, in place.

        Raises ValueError if a sequence outgrows its pages or a page is not assigned (negative).
        """
        page = self.pool.shape[1]
        counts_N = cu_seqlens.diff().long()
        n_tokens = rows.shape[0]
        sequence_T = torch.repeat_interleave(counts_N, output_size=n_tokens)
        first_N = self.lengths.long() - cu_seqlens[:-1].long()
        position_T = torch.arange(n_tokens, device=rows.device) + first_N[sequence_T]
        if n_tokens and int(position_T.max()) >= self.table.shape[1] * page:
            raise ValueError(
                f"a sequence of {int(position_T.max()) + 1} tokens exceeds its {self.table.shape[1]} pages of {page}"
            )
        page_T = self.table[sequence_T, position_T // page].long()
        if n_tokens and int(page_T.min()) < 0:
            raise ValueError("a row falls on a page that is not assigned (negative in the table)")
        self.pool[page_T, position_T % page] = rows.to(self.pool.dtype)

    def gather(self, n: int, length: int) -> Tensor:
        """The first `length` rows of sequence n: [length, L + R], without a copy if they lie on one page."""
        page = self.pool.shape[1]
        if not 0 <= length <= self.table.shape[1] * page:
            raise ValueError(f"length = {length} is not within the {self.table.shape[1]} pages of {page} rows")
        if length <= page:
            return self.pool[self.table[n, 0], :length]
        return self.pool[self.table[n, : -(-length // page)]].flatten(0, 1)[:length]


def mla_attend(
    q_THQ: Tensor,
    k_THQ: Tensor,
    v_THV: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    backend: str = "auto",
) -> Tensor:
    """Causal softmax attention per sequence: o [T, H, V] in q's dtype.

    Aligned bottom right: query i of a sequence with Lq queries and Lk >= Lq keys sees the keys up to i + Lk - Lq.
    Softmax and output in promote(dtype, float32), then one cast. Raises ValueError if Lk < Lq somewhere.
    """
    lengths = list(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True))
    if any(lq > lk for lq, lk in lengths):
        raise ValueError(f"a sequence has more queries than keys: (queries, keys) = {max(lengths, key=_excess)}")
    available = {"reference": _attend_reference, "blocked": attend_blocked, "sdpa": _attend_sdpa}
    long = sum(lq * lk for lq, lk in lengths) >= LONG * q_THQ.shape[0]
    default = "blocked" if long and q_THQ.device.type == "cpu" else "sdpa"
    return pick("mla_attend", backend, available, default)(q_THQ, k_THQ, v_THV, lengths, scale)


def _excess(lengths: tuple[int, int]) -> int:
    return lengths[0] - lengths[1]


def _attend_reference(
    q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor, lengths: list[tuple[int, int]], scale: float
) -> Tensor:
    wide = torch.promote_types(q_THQ.dtype, torch.float32)
    if not lengths:
        return v_THV.new_zeros(q_THQ.shape[0], *v_THV.shape[1:])
    n_q, n_k = zip(*lengths, strict=True)
    outputs = []
    for q, k, v in zip(q_THQ.to(wide).split(n_q), k_THQ.to(wide).split(n_k), v_THV.to(wide).split(n_k), strict=True):
        s_Hqk = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        p_Hqk = torch.softmax(s_Hqk.masked_fill(hidden, float("-inf")), dim=-1)
        outputs.append(torch.einsum("hqk,khv->qhv", p_Hqk, v))
    return torch.cat(outputs).to(q_THQ.dtype)


def _batches(lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Sequences that run together. Whole sequences (Lq = Lk) of similar length are padded to the longest as long as
    padding stays below an eighth; sequences with older keys only join their equals. Longest first."""
    batches: list[list[int]] = []
    real = 0
    for n in sorted((n for n, (lq, _) in enumerate(lengths) if lq), key=lambda n: lengths[n], reverse=True):
        lq, lk = lengths[n]
        if batches:
            longest_q, longest_k = lengths[batches[-1][0]]
            padded = longest_q * (len(batches[-1]) + 1)
            similar = lq == lk and longest_q == longest_k and padded <= 1.125 * (real + lq)
            if similar or (lq, lk) == (longest_q, longest_k):
                batches[-1].append(n)
                real += lq
                continue
        batches.append([n])
        real = lq
    return batches


class _Rows(torch.autograd.Function):
    """x[index], where -1 gives a row of zeros; every row of x is taken once at most, so that the gradient is a
    gather by `inverse` instead of a scattered sum."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(index, inverse)
        return _take(x, index)

    @staticmethod
    def backward(ctx, d_out):
        index, inverse = ctx.saved_tensors
        return _Rows.apply(d_out, inverse, index), None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    out = x.index_select(0, index.clamp(min=0))
    return out.index_fill_(0, (index < 0).nonzero().flatten(), 0)


def _layout(batches: list[list[int]], counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of the batches, one after the other, each padded to its first member's count: the flat token of each
    padded row (-1 in padding), and the padded row of each token (-1 if it is in no batch)."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    index = [
        torch.arange(starts[n], starts[n] + width).masked_fill_(torch.arange(width) >= counts[n], -1)
        for batch in batches
        for width in [counts[batch[0]]]
        for n in batch
    ]
    index = torch.cat(index)
    inverse = torch.full((starts[-1],), -1)
    inverse[index[index >= 0]] = (index >= 0).nonzero().flatten()
    return index.to(device), inverse.to(device)


def _attend_sdpa(q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor, lengths: list[tuple[int, int]], scale: float) -> Tensor:
    """PyTorch's fused attention over batches of similar lengths. Padding stands behind the real tokens, where
    causality hides it. Values are padded to the keys' width: the CPU kernel wants one width, and without it is
    three times slower."""
    wide = torch.promote_types(q_THQ.dtype, torch.float32)
    q, k = q_THQ.to(wide), k_THQ.to(wide)
    v = F.pad(v_THV.to(wide), (0, k.shape[-1] - v_THV.shape[-1]))
    batches = _batches(lengths)
    if not batches:
        return torch.zeros_like(v_THV[:0]).expand(q_THQ.shape[0], -1, -1)
    n_q, n_k = ([pair[i] for pair in lengths] for i in (0, 1))
    one_piece = len(batches) == 1 and len(set(lengths)) == 1
    if not one_piece:
        index_q, inverse_q = _layout(batches, n_q, q.device)
        index_k, inverse_k = (index_q, inverse_q) if n_q == n_k else _layout(batches, n_k, q.device)
        q = _Rows.apply(q, index_q, inverse_q)
        k, v = _Rows.apply(k, index_k, inverse_k), _Rows.apply(v, index_k, inverse_k)
    outputs = []
    sizes = [(len(batch), *lengths[batch[0]]) for batch in batches]
    for (b, lq, lk), q_b, k_b, v_b in zip(
        sizes,
        q.split([b * lq for b, lq, _ in sizes]),
        k.split([b * lk for b, _, lk in sizes]),
        v.split([b * lk for b, _, lk in sizes]),
        strict=True,
    ):
        q_BHLQ, k_BHLQ, v_BHLV = (t.unflatten(0, (b, -1)).transpose(1, 2) for t in (q_b, k_b, v_b))
        mask = None
        if 1 < lq < lk:
            mask = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)
        o_BHLV = F.scaled_dot_product_attention(q_BHLQ, k_BHLQ, v_BHLV, attn_mask=mask, is_causal=lq == lk, scale=scale)
        outputs.append(o_BHLV.transpose(1, 2).flatten(0, 1))
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    o = o if one_piece else _Rows.apply(o, inverse_q, index_q)
    return o[..., : v_THV.shape[-1]].to(q_THQ.dtype)


def _expand(latent_TL: Tensor, k_pe_TR: Tensor, w_kv_b: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [T, H, Q] and values [T, H, V] of stored rows; per head kv_b gives [k_nope | v]."""
    kv_THW = F.linear(latent_TL, w_kv_b.to(latent_TL.dtype)).unflatten(-1, (heads, -1))
    k_nope, v_THV = kv_THW.split([nope, kv_THW.shape[-1] - nope], dim=-1)
    k_pe = k_pe_TR[:, None].expand(-1, heads, -1).to(k_nope.dtype)
    return torch.cat([k_nope, k_pe], dim=-1), v_THV


def mla_expanded(
    q_THQ: Tensor,
    latent_TL: Tensor,
    k_pe_TR: Tensor,
    w_kv_b: Tensor,
    *,
    nope: int,
    cu_seqlens: Tensor,
    scale: float,
    backend: str = "auto",
) -> Tensor:
    """Attention of whole sequences without a memory (training): o [T, H, V].

    w_kv_b is [H * (nope + V), L], per head [k_nope | v]; q per head [nope | pe].
    """
    k_THQ, v_THV = _expand(latent_TL, k_pe_TR, w_kv_b, q_THQ.shape[1], nope)
    return mla_attend(
        q_THQ, k_THQ, v_THV, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, scale=scale, backend=backend
    )


def mla_over_view(
    q_THQ: Tensor,
    view: KVView,
    w_kv_b: Tensor,
    *,
    nope: int,
    cu_seqlens: Tensor,
    scale: float,
    form: str = "auto",
) -> Tensor:
    """Attention over stored rows, after `view.append`: the queries are the last tokens of each sequence: o [T, H, V].

    form "expanded" makes keys and values of all rows, "absorbed" takes q into the latent space; "auto" takes the one
    with fewer multiplications. Raises ValueError for another form.
    """
    lengths = list(zip(cu_seqlens.diff().tolist(), view.lengths.tolist(), strict=True))
    lengths = [(new, new + old) for new, old in lengths]
    if form == "auto":
        form = _cheaper_form(lengths, q_THQ.shape[-1], w_kv_b.shape, q_THQ.shape[1], nope)
    if form not in ("expanded", "absorbed"):
        raise ValueError(f"form = {form!r} is none of 'auto', 'expanded', 'absorbed'")
    attend = _over_view_expanded if form == "expanded" else _over_view_absorbed
    return attend(q_THQ, view, w_kv_b, nope, lengths, scale)


def _cheaper_form(lengths: list[tuple[int, int]], q_width: int, w_shape: torch.Size, heads: int, nope: int) -> str:
    latent, v_width = w_shape[1], w_shape[0] // heads - nope
    pairs = sum(lq * lk for lq, lk in lengths)
    n_q, n_k = sum(lq for lq, _ in lengths), sum(lk for lq, lk in lengths if lq)
    expanded = n_k * latent * (nope + v_width) + pairs * (q_width + v_width)
    absorbed = n_q * latent * (nope + v_width) + pairs * (2 * latent + q_width - nope)
    return "absorbed" if absorbed < expanded else "expanded"


def _over_view_expanded(
    q_THQ: Tensor, view: KVView, w_kv_b: Tensor, nope: int, lengths: list[tuple[int, int]], scale: float
) -> Tensor:
    latent = w_kv_b.shape[1]
    if not lengths:
        return q_THQ.new_zeros(0, q_THQ.shape[1], w_kv_b.shape[0] // q_THQ.shape[1] - nope)
    rows = torch.cat([view.gather(n, lk if lq else 0) for n, (lq, lk) in enumerate(lengths)]).to(q_THQ.dtype)
    k_THQ, v_THV = _expand(rows[:, :latent], rows[:, latent:], w_kv_b, q_THQ.shape[1], nope)
    n_q = torch.tensor([0] + [lq for lq, _ in lengths], dtype=torch.int32)
    n_k = torch.tensor([0] + [lk if lq else 0 for lq, lk in lengths], dtype=torch.int32)
    return mla_attend(q_THQ, k_THQ, v_THV, cu_seqlens_q=n_q.cumsum(0), cu_seqlens_k=n_k.cumsum(0), scale=scale)


def _over_view_absorbed(
    q_THQ: Tensor, view: KVView, w_kv_b: Tensor, nope: int, lengths: list[tuple[int, int]], scale: float
) -> Tensor:
    wide = torch.promote_types(q_THQ.dtype, torch.float32)
    heads, latent = q_THQ.shape[1], w_kv_b.shape[1]
    w_HWL = w_kv_b.to(wide).unflatten(0, (heads, -1))
    q_wide = q_THQ.to(wide)
    q_latent = torch.einsum("thd,hdl->thl", q_wide[..., :nope], w_HWL[:, :nope])
    q_rows = torch.cat([q_latent, q_wide[..., nope:]], dim=-1)
    contexts = []
    for n, (q, (lq, lk)) in enumerate(zip(q_rows.split([lq for lq, _ in lengths]), lengths, strict=True)):
        rows = view.gather(n, lk if lq else 0).to(wide)
        s_qHk = q @ rows.t() * scale
        if lq > 1:
            hidden = torch.ones(lq, lk, dtype=torch.bool, device=q.device).triu(lk - lq + 1)
            s_qHk = s_qHk.masked_fill(hidden[:, None], float("-inf"))
        contexts.append(torch.softmax(s_qHk, dim=-1) @ rows[:, :latent])
    context_THL = torch.cat(contexts) if contexts else q_latent
    return torch.einsum("thl,hvl->thv", context_THL, w_HWL[:, nope:]).to(q_THQ.dtype)
