"""Loss, held-out loss, and samples: what a model is worth, without changing it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.chat.tokenizer import Tokenizer
from openk3.data.loader import Batch
from openk3.model.generate import generate
from openk3.model.k3 import K3
from openk3.ops.cross_entropy import linear_cross_entropy


class Score(NamedTuple):
    """Loss in nats a token, and bits per byte of the text that was predicted."""

    loss: float
    bpb: float
    tokens: int


def score(nats: float, tokens: int, n_bytes: int) -> Score:
    """Bits per byte = nats / ln 2 over the UTF-8 bytes of the predicted text; [EOS] costs bits and adds no bytes."""
    return Score(nats / tokens, nats / math.log(2) / max(n_bytes, 1), tokens)


def nats(model: K3, batch: Batch) -> Tensor:
    """Summed cross-entropy of a batch, in promote(compute dtype, float32). There is no auxiliary loss."""
    h_TD = model.hidden(batch.tokens_T, batch.cu_seqlens)
    return linear_cross_entropy(h_TD, model.lm_head.weight, batch.targets_T)


def on_device(batch: Batch, device: torch.device) -> Batch:
    return batch._replace(
        tokens_T=batch.tokens_T.to(device),
        targets_T=batch.targets_T.to(device),
        cu_seqlens=batch.cu_seqlens.to(device),
    )


@contextmanager
def frozen(model: K3) -> Iterator[torch.device]:
    """Evaluation mode without gradients: routers and MLA layers show nothing, biases stay. Yields the device."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model.lm_head.weight.device
    finally:
        model.train(training)


def evaluate(model: K3, batches: Iterable[Batch]) -> Score:
    """The score over all batches together."""
    total, tokens, n_bytes = 0.0, 0, 0
    with frozen(model) as device:
        for batch in batches:
            total += float(nats(model, on_device(batch, device)))
            tokens += len(batch.targets_T)
            n_bytes += batch.n_bytes
    return score(total, tokens, n_bytes)


def samples(model: K3, tokenizer: Tokenizer, prompts: Sequence[str], *, length: int, seed: int) -> list[dict]:
    """One continuation of every prompt at temperature 0.8, prompt i with seed + i: [{prompt, text, seed}]."""
    drawn = []
    with frozen(model):
        for i, prompt in enumerate(prompts):
            ids = [tokenizer.bos, *tokenizer.encode(prompt)]
            stops = (tokenizer.eos, tokenizer.end_of_msg)
            new = generate(model, ids, max_new_tokens=length, temperature=0.8, stop_ids=stops, seed=seed + i)
            drawn.append({"prompt": prompt, "text": tokenizer.decode(list(new)), "seed": seed + i})
    return drawn
