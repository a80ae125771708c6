"""The plain decode loop: prefill the prompt once, then one token at a time from the memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from openk3.model.k3 import K3
from openk3.model.memory import Memory

COLDEST = 1e-6  # below it the division overflows, and the draw is the largest logit anyway


def sample(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    """One id: the largest logit at temperature 0, else a draw from the nucleus holding `top_p` of the mass."""
    if temperature < COLDEST:
        return int(logits_V.argmax())
    probs_V = torch.softmax(logits_V.float() / temperature, dim=-1)
    if top_p < 1:
        sorted_V, order_V = probs_V.sort(descending=True, stable=True)
        outside_V = sorted_V.cumsum(0) - sorted_V >= top_p
        outside_V[0] = False  # also where top_p is too small for float32
        probs_V[order_V[outside_V]] = 0
    return int(torch.multinomial(probs_V, 1, generator=generator))


def generate(
    model: K3,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_ids: Collection[int] = (),
    seed: int | None = None,
) -> Iterator[int]:
    """Iterator over new ids as they are drawn; the stop id that ends the text is not among them.

    The same seed gives the same ids. Raises ValueError for an empty prompt, an id outside the vocabulary, or a
    setting out of range.
    """
    check_settings(model, prompt_ids, max_new_tokens, temperature, top_p)
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed = {seed} does not fit into 64 bits")
    device = model.lm_head.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    capacity = len(prompt_ids) + max_new_tokens
    memory = Memory(model.config, slots=1, capacity=capacity, dtype=model.compute_dtype, device=device)

    @torch.no_grad()
    def decode() -> Iterator[int]:
        tokens_T = torch.tensor(list(prompt_ids), device=device)
        for _ in range(max_new_tokens):
            cu_seqlens = torch.tensor([0, len(tokens_T)], dtype=torch.int32, device=device)
            hidden_TD = model.hidden(tokens_T, cu_seqlens, memory)
            token = sample(model.lm_head(hidden_TD[-1]), temperature, top_p, generator)
            if token in stop_ids:
                return
            yield token
            tokens_T = torch.tensor([token], device=device)

    return decode()


def check_settings(model: K3, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, top_p: float) -> None:
    vocab = model.config.vocab_size
    if not len(prompt_ids):
        raise ValueError("the prompt is empty; begin with [BOS]")
    if not all(0 <= i < vocab for i in prompt_ids):
        raise ValueError(f"the prompt holds an id outside 0..{vocab - 1}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens} is negative")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature} is not a finite number >= 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} is not in (0, 1]")
