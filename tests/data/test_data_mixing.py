"""The mixture of long and short documents: its share, its repeats, and the way through the loader."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.data.loader import Loader
from openk3.data.mixing import MixPlan


def sizes_with_a_tail(n=400, seed=0):
    """Many short documents and a few long ones."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.05, rng.integers(1000, 3000, n), rng.integers(2, 300, n))


def loader(sizes, plan, **settings):
    """A loader over documents whose every token is the document's number."""
    tokens = np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes)
    offsets = np.cumsum([0, *sizes])
    settings = {"batch_tokens": 4096, "context": 512, "seed": 3} | settings
    return Loader(tokens, offsets, token_bytes=[1] * len(sizes), mix=plan.order if plan else None, **settings)


@pytest.mark.row(100)
@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_the_sampled_mix_is_the_target(share):
    """Over whole epochs within half a document; over any stretch of the loader within its counting error."""
    sizes = sizes_with_a_tail()
    plan = MixPlan(sizes, 1000, share)
    assert plan.natural < 0.4
    is_long = sizes >= 1000
    for epoch in range(3):
        order = plan.order(3, epoch)
        tokens = sizes[order]
        assert abs(tokens[is_long[order]].sum() - share / (1 - share) * sizes[~is_long].sum()) <= sizes.max() / 2
    mixed = loader(sizes, plan)
    mixed.start_mix()
    seen = np.concatenate([mixed.next().tokens_T.numpy() for _ in range(40)])
    # A sample of documents, not of tokens: the error is that of as many draws as long documents were visited.
    visits = is_long[seen].sum() / sizes[is_long].mean()
    assert abs(is_long[seen].mean() - share) < 3 * (share * (1 - share) / visits) ** 0.5 + 0.02


@pytest.mark.row(100)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.integers(2, 30), st.floats(0.05, 0.95))
def test_nothing_is_repeated_beyond_the_plan(sizes, threshold, share):
    sizes = np.array(sizes)
    try:
        plan = MixPlan(sizes, threshold, share)
    except ValueError:
        return
    counts = Counter(plan.order(0, 1).tolist())
    assert plan.repeats > 1
    for document, size in enumerate(sizes):
        allowed = {int(plan.repeats), int(plan.repeats) + 1} if size >= threshold else {1}
        assert counts[document] in allowed


def test_a_partial_round_goes_to_other_documents_each_epoch():
    plan = MixPlan(np.array([10] * 20 + [100] * 10), 100, 0.88)  # 1.47 rounds
    extras = [frozenset(d for d, n in Counter(plan.order(0, epoch).tolist()).items() if n == 2) for epoch in range(6)]
    assert {len(extra) for extra in extras} == {5} and len(set(extras)) > 3
    np.testing.assert_array_equal(plan.order(0, 2), plan.order(0, 2))
    assert not np.array_equal(plan.order(0, 2), plan.order(1, 2))


def test_a_mix_begins_in_a_fresh_epoch_and_resumes_anywhere():
    sizes = sizes_with_a_tail(60)
    plan = MixPlan(sizes, 1000, 0.7)
    unbroken, batches = loader(sizes, plan), []
    for step in range(30):
        before = unbroken.state_dict()["epoch"]
        if step >= 10:
            unbroken.start_mix()
        assert unbroken.state_dict()["epoch"] == before + (step == 10)
        batches.append(unbroken.next().tokens_T)
    own = loader(sizes, plan)
    for step in range(30):
        again = loader(sizes, plan)
        again.load_state_dict(json.loads(json.dumps(own.state_dict())))
        if step >= 10:
            again.start_mix()
        assert again.next().tokens_T.equal(batches[step])
        own = again
    with pytest.raises(ValueError, match="the loader state is of a mix, this loader has none"):
        loader(sizes, None).load_state_dict(own.state_dict())
    with pytest.raises(ValueError, match="a loader without a mix"):
        loader(sizes, None).start_mix()


def test_a_mix_that_is_not_followed_changes_nothing_and_old_states_load():
    sizes = sizes_with_a_tail(60)
    plain, mixed = loader(sizes, None), loader(sizes, MixPlan(sizes, 1000, 0.7))
    old = {name: value for name, value in plain.state_dict().items() if name != "mixed"}
    mixed.load_state_dict(old)
    for _ in range(10):
        assert plain.next().tokens_T.equal(mixed.next().tokens_T)


def test_joined_documents_are_not_genuine():
    plan = MixPlan(np.array([10, 10, 10, 50, 60]), 50, 0.6, genuine=4)
    counts = Counter(plan.order(0, 0).tolist())
    assert counts[4] == 1 and counts[3] > 1


@pytest.mark.parametrize(
    ("sizes", "threshold", "share", "message"),
    [
        ([10, 20], 100, 0.5, "no document has 100 tokens; the longest has 20"),
        ([100, 200], 100, 0.5, "every document has 100 tokens or more"),
        ([100, 100], 50, 0.5, "every document"),
        ([50, 100], 100, 0.5, "documents of 100 tokens and more are 0.667 of the text; .* got 0.5"),
        ([50, 100], 100, 1.0, "below 1, got 1.0"),
    ],
)
def test_plans_that_cannot_be(sizes, threshold, share, message):
    with pytest.raises(ValueError, match=message):
        MixPlan(np.array(sizes), threshold, share)
