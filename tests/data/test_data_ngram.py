from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.data.ngram import NgramModel, encode_text, estimate_discounts, windows
from openk3.data.sources import split, stdlib_corpus

CORPUS = [document for document in stdlib_corpus() if document.path.startswith(("json/", "email/"))]
TRAIN, HELD_OUT = ([document.text for document in side] for side in split(CORPUS))
MODEL = NgramModel(TRAIN)
CONTEXTS = st.one_of(st.binary(max_size=9), st.text("abcdefself._ \n", max_size=9).map(str.encode))


class SlowModel:
    """The same definition on dictionaries of bytes."""

    def __init__(self, texts, order):
        self.order = order
        counts = Counter()
        for text in texts:
            data = b"\xff" * order + encode_text(text) + b"\xff"
            counts.update(data[i - order : i + 1] for i in range(order, len(data)))
        self.counts = {order: counts}
        for k in range(order - 1, -1, -1):
            in_front = defaultdict(set)
            for gram in self.counts[k + 1]:
                in_front[gram[1:]].add(gram[0])
            self.counts[k] = {gram: len(bytes_in_front) for gram, bytes_in_front in in_front.items()}
        self.discounts = {k: self.discount_table(k) for k in self.counts}
        self.by_context = {k: defaultdict(dict) for k in self.counts}
        for k, table in self.counts.items():
            for gram, count in table.items():
                self.by_context[k][gram[:-1]][gram[-1]] = count

    def discount_table(self, k):
        n = Counter(self.counts[k].values())
        table = [0.0]
        for r in range(1, 9):
            ideal = 0.5
            if n[1] and n[2] and n[r]:
                # Eight and more share a discount, but the counts of counts are of exactly r and r + 1.
                ideal = r - (r + 1) * n[1] / (n[1] + 2 * n[2]) * n[r + 1] / n[r]
            table.append(min(max(ideal, 0.05), 0.95 * r))
        return table

    def probability(self, context, byte, k=None):
        k = self.order if k is None else k
        if k < 0:
            return 1 / 256
        lower = self.probability(context[1:], byte, k - 1)
        followers = self.by_context[k].get(context)
        if not followers:
            return lower
        total = sum(followers.values())
        freed = sum(self.discounts[k][min(count, 8)] for count in followers.values())
        count = followers.get(byte, 0)
        return (count - self.discounts[k][min(count, 8)] + freed * lower) / total

    def bits(self, text):
        data = b"\xff" * self.order + encode_text(text) + b"\xff"
        return -sum(np.log2(self.probability(data[i - self.order : i], data[i])) for i in range(self.order, len(data)))


@given(CONTEXTS)
def test_distribution_sums_to_one(context):
    distribution = MODEL.distribution(context)
    assert distribution.shape == (256,) and (distribution > 0).all()
    assert abs(distribution.sum() - 1) < 1e-12


@pytest.mark.parametrize("order", [0, 1, 3, 5, 7])
def test_equals_the_slow_model(order):
    train, held_out = [text[:3000] for text in TRAIN[:3]], [HELD_OUT[0][:600], "", "\u4e2d\u6587 caf\u00e9"]
    fast, slow = NgramModel(train, order), SlowModel(train, order)
    for text, bits in zip(held_out, fast.document_bits(held_out), strict=True):
        assert bits == pytest.approx(slow.bits(text), rel=1e-10)
    context = b"self."[:order] if order <= 5 else b"  self."
    expected = [slow.probability(context, byte) for byte in range(256)]
    assert fast.distribution(b"xyz" + context) == pytest.approx(expected, rel=1e-10)


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4), st.integers(0, 7))
def test_small_corpora(texts, order):
    if not any(texts):
        with pytest.raises(ValueError, match="hold no byte"):
            NgramModel(texts, order)
        return
    model, slow = NgramModel(texts, order), SlowModel(texts, order)
    text = texts[0] + "ab"
    assert model.document_bits([text])[0] == pytest.approx(slow.bits(text), rel=1e-10)
    assert model.distribution(b"") @ np.ones(256) == pytest.approx(1, abs=1e-12)


def test_discounts():
    """n(1..4) = 4, 3, 2, 1: Y = 0.4 and D = 1 - 2 Y 3/4, 2 - 3 Y 2/3, 3 - 4 Y 1/2, 4 - 0."""
    counts = np.repeat([1, 2, 3, 4, 30], [4, 3, 2, 1, 6])
    assert estimate_discounts(counts) == pytest.approx([0, 0.4, 1.2, 2.2, 3.8, 0.5, 0.5, 0.5, 0.5])
    assert estimate_discounts(np.array([5, 5])).tolist() == [0] + [0.5] * 8


def test_windows_of_documents():
    keys = [int(key).to_bytes(3, "big") for key in windows([b"ab", b"", b"c"], order=2)]
    edge = b"\xff"
    assert keys == [
        edge * 2 + b"a",
        edge + b"ab",
        b"ab" + edge,
        edge * 3,
        edge * 2 + b"c",
        edge + b"c" + edge,
    ]


def test_documents_do_not_touch():
    bits = MODEL.document_bits(HELD_OUT)
    assert bits.shape == (len(HELD_OUT),)
    alone = [MODEL.document_bits([text])[0] for text in HELD_OUT]
    assert bits == pytest.approx(alone, rel=1e-12)
    num_bytes = sum(len(text.encode()) for text in HELD_OUT)
    assert MODEL.bits_per_byte(HELD_OUT) == pytest.approx(sum(alone) / num_bytes)
    assert len(MODEL.document_bits([])) == 0


def test_the_end_of_a_document_costs_bits_and_adds_no_byte():
    text = HELD_OUT[0]
    whole = MODEL.document_bits([text])[0]
    # The same bytes without the end: the start of a longer document.
    end = -np.log2(MODEL.distribution(text.encode())[0xFF])
    data = np.frombuffer(text.encode(), np.uint8)
    steps = -sum(np.log2(MODEL.distribution(text.encode()[:i])[data[i]]) for i in range(60))
    assert 0 < end < whole and steps < whole
    prefix = text.encode()[:60].decode()
    without_end = MODEL.document_bits([prefix])[0] + np.log2(MODEL.distribution(prefix.encode())[0xFF])
    assert without_end == pytest.approx(steps, rel=1e-10)


def test_it_learns():
    """Long contexts help, more text helps, and the smoothing beats the plain mixture of the orders."""
    bits = [NgramModel(TRAIN, order).bits_per_byte(HELD_OUT) for order in (0, 2, 5)]
    assert bits[0] > 4 > 3 > bits[1] > 2.4 > bits[2] + 0.1
    assert MODEL.bits_per_byte(HELD_OUT) < NgramModel(TRAIN, max_bytes=100_000).bits_per_byte(HELD_OUT)
    assert MODEL.bits_per_byte(TRAIN) < 0.75 * MODEL.bits_per_byte(HELD_OUT)


def test_max_bytes_counts_bytes():
    texts = ["\u4e2d\u6587" * 10, "tail", "never seen"]
    model = NgramModel(texts, max_bytes=62)
    assert model.num_bytes == 62
    same = NgramModel(["\u4e2d\u6587" * 10, "ta"])
    assert model.document_bits(["tail"]) == pytest.approx(same.document_bits(["tail"]), rel=1e-14)


def test_lone_surrogates_keep_the_edge_byte_free():
    assert MODEL.document_bits(["a\ud800"])[0] == MODEL.document_bits(["a?"])[0]


def test_refusals():
    for order in (-1, 8):
        with pytest.raises(ValueError, match=rf"the order must be in 0..7, got {order}"):
            NgramModel(TRAIN, order)
    for texts in ([], ["", ""]):
        with pytest.raises(ValueError, match="hold no byte"):
            NgramModel(texts)
        with pytest.raises(ValueError, match="hold no byte"):
            MODEL.bits_per_byte(texts)
