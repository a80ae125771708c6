"""A corpus of invented words and a recipe for it, small enough for many steps in a second."""

import random

import pytest

from openk3.train.recipe import load_recipe

SYLLABLES = "ba co di fu ga hel in jo ka lum mo nar os pi qua ri stu tor ux vem wy zan".split()


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    """Twelve text files of a Markov-like toy language."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(7)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(160)]
    for i in range(12):
        lines = [" ".join(rng.choices(words, k=rng.randint(3, 9))) + "." for _ in range(60)]
        (folder / f"{i:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def make_recipe(corpus_folder):
    """A function: overrides -> recipe of 8 small steps on the toy corpus."""
    base = [
        f"data.source={corpus_folder}/*.txt",
        "data.context=32",
        "model.num_hidden_layers=3",  # KDA, KDA, MLA
        "train.steps=8",
        "train.batch_tokens=128",
        "train.eval_every=4",
        "train.eval_tokens=128",
        "train.save_every=3",
        "train.sample_tokens=4",
        'train.sample_prompts=["ba"]',
    ]
    return lambda *overrides: load_recipe("pico", [*base, *overrides])
