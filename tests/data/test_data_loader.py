import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openk3.data.loader import Batch, Loader, document_order, eval_batches, micro_batches

# Every token is its own position, so a pair (input, target) tells where it comes from.
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda lengths: max(lengths) > 1)
SIZES = {"context": st.integers(1, 7), "batch_tokens": st.integers(1, 11), "seed": st.integers(0, 5)}


def data(lengths, dtype=np.uint16):
    """(tokens, offsets, token_bytes) of documents of these lengths; token t counts t % 5 bytes."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(offsets[-1], dtype=dtype)
    return tokens, offsets, [t % 5 for t in range(offsets[-1])]


def loader(lengths, **sizes):
    tokens, offsets, token_bytes = data(lengths)
    return Loader(tokens, offsets, token_bytes=token_bytes, **sizes)


def all_pairs(lengths):
    starts = np.cumsum([0, *lengths])
    return [start + i for start, length in zip(starts, lengths, strict=False) for i in range(length - 1)]


def pieces_of(batch):
    ends = batch.cu_seqlens.tolist()
    return [batch.tokens_T[a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]


def check(batch, lengths, context):
    """What holds for every batch: shapes, types, targets, pieces of one document within the context."""
    assert batch.tokens_T.dtype == batch.targets_T.dtype == batch.bytes_T.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32 and isinstance(batch.n_bytes, int)
    assert torch.equal(batch.targets_T, batch.tokens_T + 1)
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == len(batch.tokens_T)
    assert batch.bytes_T.tolist() == [t % 5 for t in batch.targets_T.tolist()]
    assert batch.n_bytes == sum(batch.bytes_T.tolist())
    offsets = np.cumsum([0, *lengths])
    for piece in pieces_of(batch):
        assert 1 <= len(piece) <= context and piece == list(range(piece[0], piece[0] + len(piece)))
        assert np.searchsorted(offsets, piece[0], "right") == np.searchsorted(offsets, piece[-1] + 1, "right")


def equal(left, right):
    return left.n_bytes == right.n_bytes and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True) if isinstance(a, torch.Tensor)
    )


@given(LENGTHS, st.fixed_dictionaries(SIZES))
def test_every_pair_once_an_epoch(lengths, sizes):
    own = loader(lengths, **sizes)
    expected = all_pairs(lengths)
    seen = []
    while len(seen) < 3 * len(expected):
        batch = own.next()
        assert len(batch.tokens_T) == sizes["batch_tokens"]
        check(batch, lengths, sizes["context"])
        seen += batch.tokens_T.tolist()
    for epoch in range(3):
        part = seen[epoch * len(expected) : (epoch + 1) * len(expected)]
        assert sorted(part) == expected
        order = document_order(len(lengths), sizes["seed"], epoch)
        starts = np.cumsum([0, *lengths])
        assert part == [starts[d] + i for d in order for i in range(lengths[d] - 1)]


@given(LENGTHS, st.fixed_dictionaries(SIZES))
def test_pieces_stand_on_the_grid(lengths, sizes):
    """A piece ends on the grid, with its document or with its batch; one cut there goes on."""
    own = loader(lengths, **sizes)
    offsets = np.cumsum([0, *lengths])
    rest = None
    for _ in range(12):
        pieces = pieces_of(own.next())
        if rest is not None:
            assert pieces[0][0] == rest
        for i, piece in enumerate(pieces):
            document = np.searchsorted(offsets, piece[0], "right") - 1
            inside = piece[-1] + 1 - offsets[document]
            done = inside % sizes["context"] == 0 or inside == lengths[document] - 1
            assert done or i == len(pieces) - 1
            rest = None if done else piece[-1] + 1


@given(LENGTHS, st.fixed_dictionaries(SIZES), st.integers(0, 30))
def test_resume_gives_the_same_batches(lengths, sizes, before):
    own = loader(lengths, **sizes)
    for _ in range(before):
        own.next()
    state = json.loads(json.dumps(own.state_dict()))
    assert all(type(value) is int for value in state.values())
    again = loader(lengths, **sizes)
    again.next()
    again.load_state_dict(state)
    for _ in range(10):
        assert equal(own.next(), again.next()) and own.state_dict() == again.state_dict()


@given(LENGTHS, st.fixed_dictionaries(SIZES), st.integers(1, 7), st.integers(1, 11))
def test_sizes_may_change_on_the_way(lengths, sizes, context, batch_tokens):
    """A curriculum resumes with another context: still every pair once an epoch."""
    own = loader(lengths, **sizes)
    seen = own.next().tokens_T.tolist()
    longer = loader(lengths, context=context, batch_tokens=batch_tokens, seed=sizes["seed"])
    longer.load_state_dict(own.state_dict())
    expected = all_pairs(lengths)
    first = len(seen) // len(expected) + 1
    while len(seen) < first * len(expected):
        batch = longer.next()
        check(batch, lengths, context)
        seen += batch.tokens_T.tolist()
    assert sorted(seen[(first - 1) * len(expected) : first * len(expected)]) == expected


def test_state_of_other_data_is_refused():
    state = loader([4, 5], batch_tokens=3, context=4, seed=1).state_dict()
    for lengths, seed, name in (
        ([4, 5], 2, "seed 1"),
        ([4, 6], 1, "tokens 9"),
        ([4, 2, 3], 1, "documents 2"),
    ):
        with pytest.raises(ValueError, match=f"the loader state is for {name}, this loader has"):
            loader(lengths, batch_tokens=3, context=4, seed=seed).load_state_dict(state)


def test_an_example():
    """Documents of 6, 1 and 4 tokens, context 3: pieces of 3 and 2 pairs, none, 3; batches of 4."""
    own = loader([6, 1, 4], batch_tokens=4, context=3, seed=0)
    own.order = np.arange(3)
    first, second = own.next(), own.next()
    assert first.tokens_T.tolist() == [0, 1, 2, 3] and first.targets_T.tolist() == [1, 2, 3, 4]
    assert first.cu_seqlens.tolist() == [0, 3, 4] and first.n_bytes == 1 + 2 + 3 + 4
    assert second.tokens_T.tolist() == [4, 7, 8, 9] and second.targets_T.tolist() == [5, 8, 9, 10]
    assert second.cu_seqlens.tolist() == [0, 1, 4] and second.n_bytes == 0 + 3 + 4 + 0
    assert own.state_dict()["epoch"] == 1


def test_document_order():
    orders = {tuple(document_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16 and all(sorted(order) == list(range(50)) for order in orders)
    # Fixed values: an order that changed with a library would break every resumed run.
    assert document_order(6, seed=0, epoch=0).tolist() == [3, 2, 1, 0, 4, 5]
    assert document_order(6, seed=1, epoch=2).tolist() == [5, 3, 2, 1, 0, 4]


@given(LENGTHS, st.integers(1, 7), st.integers(1, 20), st.integers(1, 25))
def test_micro_batches(lengths, context, batch_tokens, micro_tokens):
    batch = loader(lengths, batch_tokens=batch_tokens, context=context, seed=0).next()
    parts = list(micro_batches(batch, micro_tokens))
    for part in parts:
        check(part, lengths, min(context, micro_tokens))
        assert len(part.tokens_T) <= micro_tokens
    assert torch.equal(torch.cat([part.tokens_T for part in parts]), batch.tokens_T)
    assert torch.equal(torch.cat([part.targets_T for part in parts]), batch.targets_T)
    assert sum(part.n_bytes for part in parts) == batch.n_bytes
    pieces = [piece for part in parts for piece in pieces_of(part)]
    if micro_tokens >= context:
        assert pieces == pieces_of(batch)
        # Greedy: the next piece would not have fitted.
        for part, following in zip(parts[:-1], parts[1:], strict=True):
            assert len(part.tokens_T) + len(pieces_of(following)[0]) > micro_tokens


def test_micro_batches_cut_only_what_is_too_long():
    batch = loader([11, 3], batch_tokens=12, context=10, seed=0)
    batch.order = np.arange(2)
    parts = list(micro_batches(batch.next(), 4))
    assert [part.cu_seqlens.tolist() for part in parts] == [[0, 4], [0, 4], [0, 2, 4]]


def test_micro_batch_of_a_batch_that_fits_is_itself():
    batch = Batch(torch.arange(3), torch.arange(3), torch.tensor([0, 3], dtype=torch.int32), 7)
    assert list(micro_batches(batch, 3)) == [batch]
    with pytest.raises(ValueError, match="without bytes_T cannot be split"):
        list(micro_batches(batch, 2))
    with pytest.raises(ValueError, match="micro_tokens must be a positive int, got 0"):
        list(micro_batches(batch, 0))


@given(LENGTHS, st.integers(1, 7), st.integers(1, 15))
def test_evaluation_sees_every_pair_once(lengths, context, batch_tokens):
    tokens, offsets, token_bytes = data(lengths)
    sizes = {"context": context, "token_bytes": token_bytes}
    batches = list(eval_batches(tokens, offsets, batch_tokens=batch_tokens, **sizes))
    for batch in batches:
        check(batch, lengths, context)
        assert len(batch.tokens_T) <= max(batch_tokens, context)
    assert sorted(t for batch in batches for t in batch.tokens_T.tolist()) == all_pairs(lengths)
    # Whole pieces, whatever the batch size.
    (whole,) = eval_batches(tokens, offsets, batch_tokens=10**6, **sizes)
    assert [piece for batch in batches for piece in pieces_of(batch)] == pieces_of(whole)
    assert sum(batch.n_bytes for batch in batches) == whole.n_bytes


@given(LENGTHS, st.integers(1, 7), st.integers(1, 15), st.integers(1, 90))
def test_evaluation_stops_at_max_tokens(lengths, context, batch_tokens, max_tokens):
    tokens, offsets, token_bytes = data(lengths)
    sizes = {"context": context, "batch_tokens": batch_tokens, "token_bytes": token_bytes}
    whole = [t for batch in eval_batches(tokens, offsets, **sizes) for t in batch.tokens_T.tolist()]
    batches = list(eval_batches(tokens, offsets, max_tokens=max_tokens, **sizes))
    assert [t for batch in batches for t in batch.tokens_T.tolist()] == whole[:max_tokens]
    assert all(len(batch.tokens_T) for batch in batches)


@given(LENGTHS, st.sampled_from([np.uint16, np.uint32]))
def test_wide_and_narrow_ids(lengths, dtype):
    tokens, offsets, token_bytes = data(lengths, dtype)
    own = Loader(tokens, offsets, batch_tokens=5, context=4, seed=0, token_bytes=token_bytes)
    assert equal(own.next(), loader(lengths, batch_tokens=5, context=4, seed=0).next())


def test_batches_own_their_memory():
    tokens, offsets, token_bytes = data([9])
    own = Loader(tokens, offsets, batch_tokens=8, context=8, seed=0, token_bytes=token_bytes)
    own.next().tokens_T.fill_(0)
    assert own.next().tokens_T.tolist() == list(range(8))


def test_refusals():
    good = {"batch_tokens": 4, "context": 4, "seed": 0}
    for name in ("batch_tokens", "context"):
        for value in (0, -1, 2.5):
            with pytest.raises(ValueError, match=f"{name} must be a positive int, got {value}"):
                loader([5], **(good | {name: value}))
    with pytest.raises(ValueError, match="3 documents hold no two tokens in a row"):
        loader([1, 0, 1], **good)
    tokens, _, token_bytes = data([5])
    for offsets in ([0, 4], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(ValueError, match="document offsets must rise from 0 to 5"):
            Loader(tokens, np.array(offsets), token_bytes=token_bytes, **good)
    with pytest.raises(ValueError, match="max_tokens must be a positive int, got 0"):
        next(eval_batches(tokens, [0, 5], context=4, batch_tokens=4, max_tokens=0, token_bytes=token_bytes))
