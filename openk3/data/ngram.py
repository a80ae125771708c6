"""An n-gram model of bytes: the honest small opponent that a language model has to beat.

Interpolated Kneser-Ney smoothing in its modified form (Chen and Goodman 1998), with a discount for each count
up to 8 where the paper has three. On the held-out standard library it needs 1.86 bits a byte at order 5, with
three discounts 1.87, and Witten-Bell smoothing of plain counts 2.16; one factor on all
discounts, chosen on the held-out side itself, gains 0.001.

    P_k(s | c) = (n_k(c s) - D(n_k(c s))) / n_k(c) + b_k(c) P_{k-1}(s | c without its first byte)
    P_{-1}(s) = 1 / 256

n_k counts occurrences at the highest order; below it, the different bytes seen in front of the sequence.
b_k(c) is the mass that the discounts of context c set free, so every distribution sums to 1.

The byte 0xFF, which UTF-8 never holds, stands before a document as padding and after it as its end: like the
language model, which pays for [EOS], the model pays for the end of a document, and the end adds no byte.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

EDGE = 0xFF
NUM_DISCOUNTS = 8
MAX_ORDER = 7  # a context and its byte fill one 64-bit key


@dataclass(frozen=True)
class Level:
    """Counts of one order. grams_G: sorted uint64 keys of context and byte, counts_G; contexts_C sorted, with
    the totals_C and the freed mass backoff_C in (0, 1] of each; discounts [NUM_DISCOUNTS + 1] by count."""

    grams_G: np.ndarray
    counts_G: np.ndarray
    contexts_C: np.ndarray
    totals_C: np.ndarray
    backoff_C: np.ndarray
    discounts: np.ndarray


def encode_text(text: str) -> bytes:
    """UTF-8; a lone surrogate becomes a question mark, so that 0xFF stays free."""
    return text.encode("utf-8", "replace")


def windows(documents: Sequence[bytes], order: int) -> np.ndarray:
    """Keys of every predicted byte behind its `order` bytes of context, [bytes + documents] uint64: len + 1 a
    document, the last of them for its end."""
    edge = bytes([EDGE])
    data = np.frombuffer(b"".join(edge * order + document + edge for document in documents), np.uint8)
    keys = np.zeros(max(len(data) - order, 0), np.uint64)
    for i in range(order + 1):
        keys = keys << np.uint64(8) | data[i : i + len(keys)]
    starts = np.cumsum([0] + [order + len(document) + 1 for document in documents[:-1]])
    inside = np.ones(len(data), bool)
    inside[starts[:, None] + np.arange(order)] = False
    return keys[inside[order:]]


def suffix(keys: np.ndarray, num_bytes: int) -> np.ndarray:
    """The last num_bytes bytes of keys."""
    return keys & np.uint64((1 << 8 * num_bytes) - 1)


def estimate_discounts(counts: np.ndarray) -> np.ndarray:
    """Discount of a count 0..8 (8 and above share one), from the counts of counts (Chen and Goodman 1998).

    D(r) = r - (r + 1) Y n(r + 1) / n(r) with Y = n(1) / (n(1) + 2 n(2)). A table too small for the formula
    takes half a count; the limits keep something for unseen bytes and something for the seen one.
    """
    n = np.bincount(np.minimum(counts, NUM_DISCOUNTS + 2), minlength=NUM_DISCOUNTS + 3).astype(float)
    discounts = np.zeros(NUM_DISCOUNTS + 1)
    for r in range(1, NUM_DISCOUNTS + 1):
        known = n[1] and n[2] and n[r]
        ideal = r - (r + 1) * n[1] / (n[1] + 2 * n[2]) * n[r + 1] / n[r] if known else 0.5
        discounts[r] = np.clip(ideal, 0.05, 0.95 * r)
    return discounts


def build_level(grams_G: np.ndarray, counts_G: np.ndarray) -> Level:
    """Sums over contexts of sorted keys and their counts."""
    contexts_G = grams_G >> np.uint64(8)
    starts_C = np.flatnonzero(np.concatenate([[True], contexts_G[1:] != contexts_G[:-1]]))
    totals_C = np.add.reduceat(counts_G, starts_C)
    discounts = estimate_discounts(counts_G)
    freed_C = np.add.reduceat(discounts[np.minimum(counts_G, NUM_DISCOUNTS)], starts_C)
    return Level(grams_G, counts_G, contexts_G[starts_C], totals_C, freed_C / totals_C, discounts)


def find(keys: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index, present) of keys in a sorted table; the index of an absent key is any valid one."""
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return index, table[index] == keys


class NgramModel:
    """Fit on texts, then ask for bits. Raises ValueError for an order outside 0..7 or for no text at all.

    max_bytes: fit on the first so many bytes of the texts only.
    """

    def __init__(self, texts: Iterable[str], order: int = 5, max_bytes: int | None = None):
        if not 0 <= order <= MAX_ORDER:
            raise ValueError(f"the order must be in 0..{MAX_ORDER}, got {order}")
        documents, left = [], max_bytes
        for text in texts:
            documents.append(encode_text(text)[:left])
            if left is not None:
                left -= len(documents[-1])
                if not left:
                    break
        self.order, self.num_bytes = order, sum(map(len, documents))
        if not self.num_bytes:
            raise ValueError("an n-gram model needs text; the texts given hold no byte")
        grams_G, counts_G = np.unique(windows(documents, order), return_counts=True)
        levels = [build_level(grams_G, counts_G)]
        for length in range(order, 0, -1):
            grams_G, counts_G = np.unique(suffix(grams_G, length), return_counts=True)
            levels.append(build_level(grams_G, counts_G))
        self.levels = levels[::-1]

    def probabilities(self, keys: np.ndarray) -> np.ndarray:
        """P(last byte | the bytes before it) of keys of order + 1 bytes, float64."""
        p = np.full(len(keys), 1 / 256)
        for k, level in enumerate(self.levels):
            grams = suffix(keys, k + 1)
            i, seen = find(grams, level.grams_G)
            counts = np.where(seen, level.counts_G[i], 0)
            j, known = find(grams >> np.uint64(8), level.contexts_C)
            kept = (counts - level.discounts[np.minimum(counts, NUM_DISCOUNTS)]) / level.totals_C[j]
            p = np.where(known, kept + level.backoff_C[j] * p, p)
        return p

    def distribution(self, context: bytes) -> np.ndarray:
        """P(byte | context) of all 256 bytes; a context shorter than the order starts a document."""
        padded = bytes([EDGE]) * self.order + context
        number = int.from_bytes(padded[len(padded) - self.order :], "big")
        return self.probabilities(np.uint64(number) << np.uint64(8) | np.arange(256, dtype=np.uint64))

    def document_bits(self, texts: Iterable[str]) -> np.ndarray:
        """Bits of every document with its end, [documents] float64."""
        documents = [encode_text(text) for text in texts]
        if not documents:
            return np.zeros(0)
        bits = -np.log2(self.probabilities(windows(documents, self.order)))
        starts = np.cumsum([0] + [len(document) + 1 for document in documents[:-1]])
        return np.add.reduceat(bits, starts)

    def bits_per_byte(self, texts: Iterable[str]) -> float:
        """Bits of all documents with their ends over the UTF-8 bytes of their texts."""
        texts = list(texts)
        num_bytes = sum(len(encode_text(text)) for text in texts)
        if not num_bytes:
            raise ValueError("bits per byte need text; the texts given hold no byte")
        return float(self.document_bits(texts).sum() / num_bytes)
