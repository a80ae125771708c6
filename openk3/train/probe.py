"""What the mechanisms have learned, read on held-out text: depth weights, decay half-lives, update norms.

Letters: S sources of a site, T tokens, H heads, K key channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openk3.data.loader import Batch
from openk3.model.attnres import PlainSite
from openk3.model.k3 import K3, Layer
from openk3.model.kda import KDA
from openk3.train.evaluate import frozen, on_device

SLOWEST = -1e-12  # log decay of a channel that has stopped fading: its half-life is a number still
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def sites(model: K3) -> Iterator[tuple[str, PlainSite]]:
    """Every place that reads the depth, by name, in the order of the forward pass."""
    for i, layer in enumerate(model.model.layers):
        assert isinstance(layer, Layer)
        yield f"layers.{i}.attention", layer.attention_site
        yield f"layers.{i}.mlp", layer.ffn_site
    yield "output", model.model.output_site


def half_life(log_decay_HK: Tensor) -> Tensor:
    """Tokens after which a channel has forgotten half, from its mean log decay per token."""
    return math.log(0.5) / log_decay_HK.clamp(max=SLOWEST)


def probe(model: K3, batch: Batch, update_norms: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of a "probe" line.

    attnres: mean weights of each site over the tokens; half_lives: per KDA layer and head the quantiles over key
    channels of ln 0.5 / (mean log decay); update_norms: per matrix with heads, the norm of the last update of each
    head over the learning rate.
    """
    weights: dict[str, list[float]] = {}
    decays: dict[int, Tensor] = {}

    def see_weights(site: str, weights_ST: Tensor) -> None:
        weights[site] = weights_ST.double().mean(1).tolist()

    def see_input(module: KDA, inputs: tuple) -> None:
        decays[module.layer] = module.log_decay(inputs[0]).double().mean(0)

    hooks = [m.register_forward_pre_hook(see_input) for m in model.modules() if isinstance(m, KDA)]
    watched = list(sites(model))
    for name, site in watched:
        site.observer = partial(see_weights, name)
    try:
        with frozen(model) as device:
            batch = on_device(batch, device)
            model.hidden(batch.tokens_T, batch.cu_seqlens)
    finally:
        for hook in hooks:
            hook.remove()
        for _, site in watched:
            site.observer = None
    return {
        "attnres": [{"site": name, "weights": weights[name]} for name, _ in watched if name in weights],
        "half_lives": [{"layer": i, "heads": quantiles(half_life(decays[i]))} for i in sorted(decays)],
        "update_norms": [{"name": name, "heads": norms.tolist()} for name, norms in update_norms.items()],
    }


def quantiles(values_HK: Tensor) -> list[list[float]]:
    """Five quantiles over the channels of each head, [H][5]."""
    levels = torch.tensor(QUANTILES, dtype=values_HK.dtype, device=values_HK.device)
    return torch.quantile(values_HK, levels, dim=1).T.tolist()
