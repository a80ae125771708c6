"""Choosing a backend: call, environment, default, and errors that name the reason."""

import pytest
import torch

from openk3.ops.dispatch import pick
from openk3.ops.norm import rms_norm

AVAILABLE = {"reference": lambda: "slow", "fast": lambda: "quick", "gpu": "it needs a GPU"}


def chosen(backend: str = "auto", op: str = "mix") -> str:
    return pick(op, backend, AVAILABLE, "fast")()


def test_auto_takes_the_default(monkeypatch):
    monkeypatch.delenv("OPENK3_BACKEND", raising=False)
    assert chosen() == "quick"
    assert chosen("reference") == "slow"


def test_environment_forces_every_op_or_some(monkeypatch):
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    assert chosen() == "slow"
    assert chosen("fast") == "quick"  # a backend named in the call stays
    monkeypatch.setenv("OPENK3_BACKEND", "other=reference, mix=reference")
    assert (chosen(), chosen(op="third")) == ("slow", "quick")


def test_errors_name_the_reason(monkeypatch):
    with pytest.raises(ValueError, match="'gpu' of mix is not available: it needs a GPU; available are auto, refer"):
        chosen("gpu")
    with pytest.raises(ValueError, match="'nonsense' of mix is not available: it does not exist"):
        chosen("nonsense")
    monkeypatch.setenv("OPENK3_BACKEND", "mix=")
    with pytest.raises(ValueError, match="OPENK3_BACKEND"):
        chosen()


def test_an_op_obeys_the_environment(monkeypatch):
    monkeypatch.setenv("OPENK3_BACKEND", "absent")
    with pytest.raises(ValueError, match="'absent' of rms_norm"):
        rms_norm(torch.ones(2, 3), torch.ones(3), 1e-5)
