"""Counting parameters by part, from the shape table alone (model.md section 13; K3 in seconds, without its weights).

Active parameters are the weights touched per token: the output head and the routers count, the input embedding does
not, and of the routed experts k of E do (decisions.md).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from openk3.config import K3Config
from openk3.model.released import EXPERTS, Entry, text_entries, vision_entries

BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class Audit:
    """Parameters by part, in all, and per token; bytes and tensors of the file."""

    parts: dict[str, int]
    total: int
    active: int
    tensors: int
    nbytes: int


def part_of(name: str, kinds: tuple[str, ...]) -> str:
    """The part of the model a released tensor belongs to."""
    if name.startswith("vision_tower."):
        return "vision tower"
    if name.startswith("mm_projector."):
        return "projector"
    if "embed_tokens" in name:
        return "input embedding"
    if "lm_head" in name:
        return "output head"
    if EXPERTS in name:
        return "routed experts"
    if "shared_experts" in name:
        return "shared experts"
    if "block_sparse_moe.gate" in name:
        return "routers"
    if "routed_expert_" in name:
        return "latent projections"
    if ".mlp." in name:
        return "dense FFN"
    if ".self_attn." in name:
        layer = int(name.split(".layers.")[1].split(".")[0])
        return {"kda": "KDA layers", "mla": "MLA layers"}[kinds[layer]]
    return "norms and AttnRes queries"


def elements(entry: Entry) -> int:
    """Parameters a tensor holds: two to a byte where packed, none in its scales."""
    if entry.name.endswith("weight_scale"):
        return 0
    return math.prod(entry.shape) * (2 if entry.name.endswith("weight_packed") else 1)


def audit(config: K3Config, *, vision: bool = False, packed: bool = False) -> Audit:
    """Count a model: text alone, or with the vision tower; experts in bf16 or packed as shipped."""
    entries = list(text_entries(config, packed=packed))
    if vision:
        entries += vision_entries(config.hidden_size)
    kinds = config.layer_kinds
    parts: Counter[str] = Counter()
    for entry in entries:
        parts[part_of(entry.name, kinds)] += elements(entry)
    routed = parts["routed experts"]
    text = sum(parts.values()) - parts["vision tower"] - parts["projector"]
    active = text - parts["input embedding"] - routed + routed * config.num_experts_per_token // config.num_experts
    nbytes = sum(math.prod(e.shape) * BYTES[e.dtype] for e in entries)
    return Audit(dict(parts), sum(parts.values()), active, len(entries), nbytes)
