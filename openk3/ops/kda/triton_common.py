"""What the Triton kernels of KDA share: chunk size, operand type, and the plan that cuts ragged sequences.

The plan is made without a look at `cu_seqlens` from the host, so that a captured graph may be replayed with other
lengths: launch sizes are upper bounds, and what lies beyond the real work leaves at once.

    piece   tokens between two neighbouring cuts (sequence bounds and state offsets); the chunk grid starts anew here
    chunk   32 tokens of a piece (its last one may be short)
    span    the chunks that one program walks in order: a piece, or a part of one where segments run in parallel

Legend: T tokens, N sequences, P pieces, H heads, K key and V value channels, C = 32 tokens of a chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# With the log decay above -5, 32 tokens around the middle of a chunk span e^-80 to e^80: inside bf16 and float32. So
# one reference serves the whole tile of scores. 64 would need a tile of its own for the far corner, 16 twice the steps.
CHUNK = 32
EPS = 1e-6  # added to the sum of squares, inside the root
SPAN_FIELDS = 5  # first token, tokens, first chunk, and what it ends at (-1: none): state offset, sequence

OPERAND = {torch.bfloat16: tl.bfloat16, torch.float16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _spans_of(length, seq_length, min_segment, max_segments, C: tl.constexpr):
    """(spans of a piece, chunks of a span): a function of the lengths of the sequence and the piece alone."""
    segments = tl.minimum(tl.maximum(seq_length // min_segment, 1), max_segments)
    per_span = tl.maximum(tl.cdiv(tl.cdiv(seq_length, C), segments), 1)
    return tl.cdiv(tl.cdiv(length, C), per_span), per_span


@triton.jit
def _plan_kernel(
    cuts,
    piece_seq_length,
    piece_offset,
    piece_end,
    chunk_table,
    span_table,
    first_span,
    P,
    max_chunks,
    max_spans,
    min_segment,
    max_segments,
    HAS_OFFSETS: tl.constexpr,
    C: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p writes the chunks and spans of piece p; program P what is left of the tables: nothing to do."""
    p = tl.program_id(0)
    chunk_count = tl.zeros([BLOCK], tl.int32)
    span_count = tl.zeros([BLOCK], tl.int32)
    for at in range(0, p, BLOCK):
        i = at + tl.arange(0, BLOCK)
        begin = tl.load(cuts + i, i < p, 0).to(tl.int32)
        end = tl.load(cuts + i + 1, i < p, 0).to(tl.int32)
        seq_length = end - begin
        if HAS_OFFSETS:
            seq_length = tl.load(piece_seq_length + i, i < p, 0).to(tl.int32)
        spans, _ = _spans_of(end - begin, seq_length, min_segment, max_segments, C)
        chunk_count += tl.cdiv(end - begin, C)
        span_count += spans
    chunk = tl.sum(chunk_count, 0)
    span = tl.sum(span_count, 0)
    tl.store(first_span + p, span)
    block = tl.arange(0, BLOCK)
    if p < P:
        begin = tl.load(cuts + p).to(tl.int32)
        end = tl.load(cuts + p + 1).to(tl.int32)
        seq_length = end - begin
        offset = -1
        sequence = p
        if HAS_OFFSETS:
            seq_length = tl.load(piece_seq_length + p).to(tl.int32)
            offset = tl.load(piece_offset + p).to(tl.int32)
            sequence = tl.load(piece_end + p).to(tl.int32)
        spans, per_span = _spans_of(end - begin, seq_length, min_segment, max_segments, C)
        chunks = tl.cdiv(end - begin, C)
        for at in range(0, chunks, BLOCK):
            i = at + block
            to = chunk_table + (chunk + i) * 2
            tl.store(to, begin + i * C, i < chunks)
            tl.store(to + 1, tl.minimum(end - begin - i * C, C), i < chunks)
        for at in range(0, spans, BLOCK):
            i = at + block
            live = i < spans
            start = begin + i * per_span * C
            to = span_table + (span + i) * FIELDS
            tl.store(to, start, live)
            tl.store(to + 1, tl.minimum(end - start, per_span * C), live)
            tl.store(to + 2, chunk + i * per_span, live)
            tl.store(to + 3, tl.where(i == spans - 1, offset, -1), live)
            tl.store(to + 4, tl.where(i == spans - 1, sequence, -1), live)
    else:
        for at in range(chunk, max_chunks, BLOCK):
            i = at + block
            tl.store(chunk_table + i * 2 + 1, tl.zeros([BLOCK], tl.int32), i < max_chunks)
        for at in range(span, max_spans, BLOCK):
            i = at + block
            tl.store(span_table + i * FIELDS + 1, tl.zeros([BLOCK], tl.int32), i < max_spans)


class Plan:
    """Tables on the device and the launch bounds that go with them.

    chunk_table int32 [max_chunks, 2] (first token, tokens); span_table int32 [max_spans, 5]; first_span int32 [P + 1];
    first_piece int32 [N + 1], or None when pieces are sequences.
    """

    def __init__(self, cu_seqlens: Tensor, T: int, offsets: Tensor | None, min_segment: int, max_segments: int):
        device = cu_seqlens.device
        self.N = cu_seqlens.numel() - 1
        cuts = seq_length = piece_offset = piece_end = self.first_piece = cu_seqlens
        if offsets is not None:
            cuts, seq_length, piece_offset, piece_end, self.first_piece = _pieces(cu_seqlens, offsets)
        self.has_offsets = offsets is not None
        self.P = P = cuts.numel() - 1
        self.max_chunks = T // CHUNK + P
        extra = self.N + 2 * P if self.has_offsets else P  # what rounding up per piece can add
        self.max_spans = min(T // min_segment, self.N * max_segments) + extra
        ints = torch.empty(2 * self.max_chunks + SPAN_FIELDS * self.max_spans + P + 1, dtype=torch.int32, device=device)
        self.chunk_table, self.span_table, self.first_span = ints.split(
            [2 * self.max_chunks, SPAN_FIELDS * self.max_spans, P + 1]
        )
        _plan_kernel[(P + 1,)](
            cuts,
            seq_length,
            piece_offset,
            piece_end,
            self.chunk_table,
            self.span_table,
            self.first_span,
            P,
            self.max_chunks,
            self.max_spans,
            min_segment,
            max_segments,
            HAS_OFFSETS=self.has_offsets,
            C=CHUNK,
            FIELDS=SPAN_FIELDS,
            BLOCK=256,
            num_warps=4,
        )


def _pieces(cu_seqlens: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """(cuts [P+1], length of the sequence of each piece, offset and sequence each ends at or -1, first piece of a
    sequence).

    Of equal cuts the later ones make empty pieces. A state is read after the LAST piece that ends at its offset and
    belongs to the same sequence, so a piece ends at offset o when its end is o and it is not empty.
    """
    cu, offsets = cu_seqlens.long(), offsets.to(cu_seqlens.device).long()
    cuts = torch.cat((cu, offsets)).sort().values
    begin, end = cuts[:-1].contiguous(), cuts[1:].contiguous()
    order = offsets.sort(stable=True)
    rank = torch.searchsorted(order.values, end)
    slot = rank.clamp(max=len(offsets) - 1)
    hit = (order.values[slot] == end) & (end > begin)
    piece_offset = torch.where(hit, order.indices[slot], -1)
    sequence = (torch.searchsorted(cu, begin, right=True) - 1).clamp(max=len(cu) - 2)
    lengths = (cu[1:] - cu[:-1])[sequence]
    piece_end = torch.where((end == cu[sequence + 1]) & (end > begin), sequence, -1)
    first_piece = torch.searchsorted(cuts, cu).clamp(max=len(cuts) - 1)
    first_piece[-1] = len(cuts) - 1
    tables = (cuts, lengths, piece_offset, piece_end, first_piece)
    return tuple(table.to(torch.int32).contiguous() for table in tables)
