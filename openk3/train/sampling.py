"""Letting a trained run write: find its checkpoint and tokenizer, stream text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openk3.chat.tokenizer import StreamDecoder, Tokenizer
from openk3.errors import UserError
from openk3.model.checkpoint import load_model
from openk3.model.generate import generate
from openk3.train.state import model_part


def find(path: Path) -> tuple[Path, Path]:
    """Model folder and rank file of a run folder (its newest checkpoint), a checkpoint, or a model folder.

    Raises UserError naming what is not there.
    """
    model = model_part(path)
    ranks = model / "tiktoken.model"
    if not ranks.is_file():
        raise UserError(f"{path} is no run folder and no checkpoint: {ranks} is not there")
    return model, ranks


def stream(path: Path, prompt: str, **settings: Any) -> Iterator[str]:
    """Pieces of text that follow `prompt`, as `generate` draws them (settings are its keywords)."""
    model_folder, ranks = find(path)
    tokenizer = Tokenizer(ranks)
    model = load_model(model_folder)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(
            f"{ranks} gives {tokenizer.vocab_size} ids, but the model beside it has {model.config.vocab_size}; the "
            "file is cut short, or of another model"
        )
    decoder = StreamDecoder(tokenizer)
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    stops = {tokenizer.eos, tokenizer.end_of_msg}
    for token in generate(model, ids, stop_ids=stops, **settings):
        yield decoder.push(token)
    yield decoder.flush()
