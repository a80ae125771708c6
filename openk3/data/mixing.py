"""Mixing: long documents are rare, so the share of them in training is raised (report section 3.4).

    plan = MixPlan(n_tokens_of_each_document, threshold=8192, share=0.3)
    Loader(..., order=plan.order)

Every short document is read once an epoch, as without a plan. The long ones are repeated, all equally often but for
one round: the last is cut short where the target share is reached, and each epoch draws anew who is in it. Which
documents are long is decided by their own length; documents joined from short ones are not genuine and do not count.
"""

import numpy as np

from openk3.data.loader import document_order


class MixPlan:
    """An order of documents in which the long ones make up a given share of the tokens.

    sizes [N]: tokens of each document. genuine: documents from this number on were synthesised and are never
    repeated; None: all are genuine. natural: the share of long documents without a plan; repeats: how often a token
    of a long document is read in an epoch, on average. Raises ValueError when there are no long documents, no others,
    or the share is not above the natural one.
    """

    def __init__(self, sizes: np.ndarray, threshold: int, share: float, genuine: int | None = None):
        self.sizes = np.asarray(sizes, dtype=np.int64)
        is_long = self.sizes >= threshold
        is_long[len(self.sizes) if genuine is None else genuine :] = False
        self.long, self.others = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        long_tokens, other_tokens = int(self.sizes[self.long].sum()), int(self.sizes[self.others].sum())
        if not long_tokens:
            raise ValueError(f"no document has {threshold} tokens; the longest has {self.sizes.max(initial=0)}")
        if not other_tokens:
            raise ValueError(f"every document has {threshold} tokens or more: there is nothing to mix them with")
        self.natural = long_tokens / (long_tokens + other_tokens)
        if not self.natural < share < 1:
            raise ValueError(
                f"documents of {threshold} tokens and more are {self.natural:.3f} of the text; "
                f"a share to raise that to must lie above it and below 1, got {share}"
            )
        self.budget = share / (1 - share) * other_tokens
        self.repeats = self.budget / long_tokens

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The documents of an epoch in the order they are read, long ones several times: a pure function."""
        rounds = int(self.repeats)
        last = self.long[document_order(len(self.long), seed, epoch)]
        # The nearest number of documents to the budget: off by half a document at most.
        sums = np.concatenate([[0], np.cumsum(self.sizes[last])]) + rounds * self.sizes[self.long].sum()
        last = last[: np.abs(sums - self.budget).argmin()]
        visits = np.concatenate([self.others, np.tile(self.long, rounds), last])
        return visits[document_order(len(visits), seed, epoch)]
