"""Stages of context: where they begin, what a step of each reads, and that nothing else follows them."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.errors import UserError
from openk3.train import loop
from openk3.train.curriculum import K3_STAGES, context_at, first_steps, longest
from openk3.train.loop import train
from openk3.train.metrics import TIMING
from openk3.train.prepare import start
from openk3.train.recipe import load_recipe, parse_recipe
from openk3.train.schedule import learning_rate

# Four stages, like the report's, shorter; the shares leave every stage a step of eight.
PLAN = "[[16, 0.5], [64, 0.25], [256, 0.125], [1024, 0.125]]"
STARTS, CONTEXTS = [0, 4, 6, 7], [16] * 4 + [64] * 2 + [256, 1024]


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    """Many short texts and three long ones of random words."""
    folder, rng = tmp_path_factory.mktemp("long"), random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 5))) for _ in range(300)]
    for i in range(24):
        text = " ".join(rng.choices(words, k=3000 if i % 8 == 1 else 120))
        (folder / f"{i:02d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def staged(make_recipe, long_corpus):
    def build(*overrides):
        sizes = ["train.batch_tokens=1024", "train.micro_tokens=1024", "train.eval_every=8", "train.save_every=100"]
        return make_recipe(f"data.source={long_corpus}/*.txt", f"data.context={PLAN}", *sizes, *overrides)

    return build


def train_lines(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in lines if line["kind"] == "train"]


def test_the_stages_of_the_report():
    assert first_steps(K3_STAGES, 100_000) == [0, 85_000, 95_000, 99_000]
    assert [context_at(step, K3_STAGES, 100_000) for step in (0, 84_999, 85_000, 94_999, 98_999, 99_000, 99_999)] == [
        8192, 8192, 65_536, 65_536, 262_144, 1_048_576, 1_048_576,
    ]  # fmt: skip
    assert context_at(7, 512, 8) == longest(512) == 512
    assert longest(K3_STAGES) == 1_048_576


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 500))
def test_every_step_belongs_to_one_stage_and_stages_have_their_share(weights, steps):
    stages = tuple((2**i, weight / sum(weights)) for i, weight in enumerate(weights))
    try:
        starts = first_steps(stages, steps)
    except ValueError:
        return
    counts = [0] * len(stages)
    for step in range(steps):
        counts[int(np.log2(context_at(step, stages, steps)))] += 1
    assert starts[0] == 0 and counts == np.diff([*starts, steps]).tolist()
    assert all(abs(n - share * steps) <= 1 for n, (_, share) in zip(counts, stages, strict=True))


@pytest.mark.row(98)
def test_a_plan_of_four_stages_trains_and_edits_no_position(staged, tmp_path, monkeypatch):
    """Sequences become as long as the stage says at exactly its step; model and rates are those without a plan."""
    cut = []
    on_device = loop.on_device

    def spy(batch, device):
        cut.append(batch.cu_seqlens.diff())
        return on_device(batch, device)

    recipe, plain = staged(), staged("data.context=1024")
    train(plain, tmp_path / "plain", progress=False)
    monkeypatch.setattr(loop, "on_device", spy)
    train(recipe, tmp_path / "staged", progress=False)
    lines = train_lines(tmp_path / "staged")
    assert [line["context"] for line in lines] == CONTEXTS
    pieces = cut[:8]  # before the evaluation of the last step
    assert all(int(lengths.sum()) == 1024 for lengths in pieces)
    assert [int(lengths.max()) for lengths in pieces[:6]] == CONTEXTS[:6]
    assert 64 < int(pieces[6].max()) <= 256 and int(pieces[7].max()) > 256
    assert recipe.model == plain.model  # no field of the model follows the stage
    rates = [learning_rate(step, 8, peak=recipe.optim.lr) for step in range(8)]
    assert [line["lr"] for line in lines] == [line["lr"] for line in train_lines(tmp_path / "plain")] == rates


@pytest.mark.row(98)
def test_stopped_inside_every_stage_is_the_unbroken_run(staged, tmp_path, monkeypatch):
    """With the mixture changing on the way; the loader stands in another stage after each stop."""
    recipe = staged("data.long_tokens=1000", "data.long_share=0.8", "data.long_from=0.6")
    train(recipe, tmp_path / "whole", progress=False)
    training_step = loop.training_step
    for stop in (2, 5, 6, 7, 8):

        def step_until(run, stop=stop, **settings):
            if run.step == stop:
                raise KeyboardInterrupt
            result = training_step(run, **settings)
            run.save()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(loop, "training_step", step_until)
            try:
                train(recipe, tmp_path / "broken", progress=False)
            except KeyboardInterrupt:
                assert stop < 8
    assert train_lines(tmp_path / "broken") == train_lines(tmp_path / "whole")


def test_the_mixture_is_followed_from_its_step(staged, tmp_path):
    run = start(
        staged("data.long_tokens=1000", "data.long_share=0.8", "data.long_from=0.6"), tmp_path, print, shown=False
    )
    mixed = []
    for run.step in range(8):
        loop.set_stage(run)
        mixed.append(run.loader.mixed)
        run.loader.next()
    run.metrics.close()
    assert mixed == [False] * 5 + [True] * 3


def test_a_plan_is_read_and_written():
    recipe = load_recipe("pico", ["data.context=[[32, 0.5], [1.28e2, 0.5]]"])
    assert recipe.data.context == ((32, 0.5), (128, 0.5))
    assert parse_recipe(recipe.to_toml()) == recipe
    assert load_recipe("pico").data.context == 128


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.context=[]", r"data.context = \[\] is neither a whole number nor a list of stages \[tokens, share"),
        ("data.context=[32, 64]", r"data.context = \[32, 64\] is neither a whole number nor a list of stages"),
        ("data.context=[[32, 0.5, 1]]", r"neither a whole number nor a list of stages"),
        ("data.context=long", r"data.context = 'long' is not a whole number"),
        ("data.context=true", r"data.context = True is not a whole number"),
        ("data.context=1.5", r"data.context = 1.5 is not a whole number"),
        ("data.context=0", r"data.context = 0 must be above 0"),
        ("data.context=[[0, 1]]", r"data.context = 0 must be above 0"),
        ("data.context=[[1" + "0" * 400 + ", 1]]", r"data.context = 10+ is too large"),
        ("data.context=[[32, 0.5], [64, 0.4]]", r"data.context: the shares of the stages add up to 0.9, not to 1"),
        ("data.context=[[32, 1.5], [64, -0.5]]", r"data.context: the share 1.5 of a stage must be a number above 0"),
        ("data.context=[[32, nan]]", r"data.context: the share nan of a stage"),
        ("data.context=[[32, 'half']]", r"data.context: the share 'half' of a stage"),
        ("data.context=[[32, 0.999], [64, 0.001]]", r"data.context: stage 2, 64 tokens for 0.001 of the run, gets no"),
        ("data.context=[[32, 0.5], [4096, 0.5]]", r"train.batch_tokens = 2048 is below the stage of data.context with"),
        ("data.long_tokens=64", r"data.long_tokens = 64 and data.long_share = 0.0: either both are 0 or none is"),
        ("data.joined_share=0.5", r"data.joined_tokens = 0 and data.joined_share = 0.5: either both are 0"),
        ("data.long_share=1", r"data.long_share = 1.0 must be at least 0 and below 1"),
        ("data.long_from=-1", r"data.long_from = -1.0 must be at least 0 and below 1"),
    ],
)  # fmt: skip
def test_wrong_plans_are_told_in_one_sentence(override, message):
    with pytest.raises(UserError, match=message) as error:
        load_recipe("pico", [override])
    assert "\n" not in str(error.value)


def test_a_stage_longer_than_a_micro_batch_is_refused():
    with pytest.raises(UserError, match=r"train.micro_tokens = 1024 is below data.context = 2048"):
        load_recipe("pico", ["data.context=[[32, 0.5], [2048, 0.5]]", "train.micro_tokens=1024"])


def test_a_mixture_the_text_cannot_give(staged, tmp_path):
    with pytest.raises(UserError, match=r"data.long_tokens, data.long_share: no document has 100000 tokens"):
        train(staged("data.long_tokens=100000", "data.long_share=0.5"), tmp_path / "run", progress=False)
