"""generate: greedy equals argmax over full forwards; seeds repeat; nucleus; stop ids; streaming; refusals."""

import itertools

import pytest
import torch

from openk3.config import named
from openk3.model.generate import generate, sample
from openk3.model.k3 import K3


@pytest.fixture(scope="module")
def model() -> K3:
    model = K3.initialised(named("pico"), 0).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "proj" in name or "embed" in name or "head" in name:
                p *= 6
    return model


def greedy(model: K3, ids: list[int], n: int) -> list[int]:
    for _ in range(n):
        cu = torch.tensor([0, len(ids)], dtype=torch.int32)
        ids = [*ids, int(model(torch.tensor(ids), cu)[-1].argmax())]
    return ids[-n:]


def test_greedy_equals_full_forwards(model: K3) -> None:
    prompt = [512, 3, 40, 7]
    expected = greedy(model, prompt, 12)
    assert list(generate(model, prompt, max_new_tokens=12, temperature=0)) == expected
    assert len(set(expected)) > 2
    stop = expected[4]
    cut = list(generate(model, prompt, max_new_tokens=12, temperature=0, stop_ids={stop}))
    assert cut == expected[: expected.index(stop)]


def test_seeds_repeat_and_differ(model: K3) -> None:
    first, again, other = (list(generate(model, [512, 9], max_new_tokens=20, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_it_streams(model: K3) -> None:
    assert len(list(itertools.islice(generate(model, [512], max_new_tokens=10**6 // 64), 3))) == 3


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8)):
        probs = torch.softmax(logits / temperature, 0)
        if top_p < 1:  # 0.644 + 0.237 >= 0.8: two ids remain
            probs = torch.cat([probs[:2] / probs[:2].sum(), torch.zeros(2)])
        draws = torch.tensor([sample(logits, temperature, top_p, generator) for _ in range(4000)])
        counts = torch.bincount(draws, minlength=4) / 4000
        assert (counts - probs).abs().max() < 0.03
    assert sample(logits, 1.0, 1e-9, generator) == 0
    assert sample(logits, 1.0, 1e-300, generator) == sample(logits, 1e-300, 1.0, generator) == 0


@pytest.mark.parametrize(
    ("prompt", "change", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([768], {}, r"outside 0..767"),
        ([1], {"temperature": -1}, "temperature = -1"),
        ([1], {"temperature": float("nan")}, "temperature = nan"),
        ([1], {"top_p": 0}, "top_p = 0"),
        ([1], {"seed": 2**63}, "seed = 9223372036854775808 does not fit into 64 bits"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens = -1"),
    ],
)
def test_wrong_settings_are_refused_at_once(model: K3, prompt: list[int], change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(model, prompt, **({"max_new_tokens": 1} | change))
