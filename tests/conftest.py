"""What all tests share: the same random numbers every time, a cache of their own, golden values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# The default suite says the same thing every time it runs: fixed examples, no time limit on a busy machine.
hypothesis.settings.register_profile("exact", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("exact")


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Encoded corpora of the tests stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """golden("kda_small") is the content of tests/golden/kda_small.json."""
    return lambda name: json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text(encoding="utf-8"))
