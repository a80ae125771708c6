"""Which parameter gets which treatment, by name (training.md section 2.2).

By name, because marks on parameters vanish when a wrapper swaps them: then per-head Muon would silently become plain
Muon. Every parameter must match exactly one rule, and the number of per-head blocks must be the one the config gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.config import K3Config

# (pattern of the whole name less "model.layers.{i}.", treatment)
RULES: tuple[tuple[str, str], ...] = (
    (r"self_attn\.[qkv]_proj\.weight", "heads"),
    (r"self_attn\.q_b_proj\.weight", "heads"),
    (r"self_attn\.kv_b_proj\.weight", "heads"),  # a head's key and value rows together
    (r"self_attn\.g_proj\.weight", "whole"),  # the report names Q, K and V alone
    (r"self_attn\.(o|q_a|f_a|f_b|b)_proj\.weight", "whole"),  # o: heads stand on the input axis
    (r"self_attn\.kv_a_proj_with_mqa\.weight", "whole"),
    (r"self_attn\.g_proj\.(down|up)\.weight", "whole"),
    (r"(mlp|block_sparse_moe\.shared_experts)\.(gate|up|down)_proj\.weight", "whole"),
    (r"block_sparse_moe\.(gate|routed_expert_(down|up)_proj)\.weight", "whole"),
    (r"block_sparse_moe\.experts\.w[123]", "experts"),
    (r"(model\.embed_tokens|lm_head)\.weight", "adamw"),
    (r"self_attn\.[qkv]_conv1d\.weight", "adamw"),
    (r"(.*\.)?\w*norm\.weight", "adamw_undecayed"),
    (r"(model\.output_attn|self_attention|mlp)_res_proj\.weight", "adamw_undecayed"),
    (r"self_attn\.(A_log|dt_bias)", "adamw_undecayed"),
)


@dataclass(frozen=True)
class Part:
    """One parameter that Muon sees as `blocks` equal matrices [rows, columns], one after the other."""

    name: str
    blocks: int
    rows: int
    columns: int

    def of(self, tensor: Tensor) -> Tensor:
        """The parameter, its gradient or its update as a view [blocks, rows, columns]."""
        return tensor.view(self.blocks, self.rows, self.columns)


@dataclass(frozen=True)
class Plan:
    """Every parameter in one of three places, in the model's order."""

    muon: tuple[Part, ...]
    adamw: tuple[str, ...]  # decayed
    adamw_undecayed: tuple[str, ...]
    heads: dict[str, int]  # matrices with heads on their rows, and how many


def treatment(name: str) -> str:
    """The treatment of a parameter. Raises ValueError when not exactly one rule fits."""
    short = re.sub(r"^model\.layers\.\d+\.", "", name)
    found = [kind for pattern, kind in RULES if re.fullmatch(pattern, short)]
    if len(found) != 1:
        raise ValueError(f"parameter {name!r} fits {len(found)} of the optimizer's name rules, expected exactly one")
    return found[0]


def head_count(name: str, config: K3Config) -> int:
    layer = int(name.removeprefix("model.layers.").split(".")[0])
    return config.kda_num_heads if config.layer_kinds[layer] == "kda" else config.num_attention_heads


def plan(parameters: Iterable[tuple[str, Tensor]], config: K3Config, optimizer: str = "per_head_muon") -> Plan:
    """Sort named parameters. Raises ValueError for an unknown name, a shape that its heads do not divide, or a
    number of per-head blocks other than the config's."""
    parts: list[Part] = []
    plain: dict[str, list[str]] = {"adamw": [], "adamw_undecayed": []}
    heads: dict[str, int] = {}
    for name, tensor in parameters:
        kind = treatment(name)
        if kind == "heads":
            heads[name] = head_count(name, config)
        if kind in plain or optimizer == "adamw":
            plain["adamw_undecayed" if kind == "adamw_undecayed" else "adamw"].append(name)
        else:
            per_head = optimizer == "per_head_muon" and kind == "heads"
            blocks = len(tensor) if kind == "experts" else head_count(name, config) if per_head else 1
            parts.append(part(name, tensor.shape, blocks))
    check_count(parts, heads, config, optimizer)
    return Plan(tuple(parts), tuple(plain["adamw"]), tuple(plain["adamw_undecayed"]), heads)


def part(name: str, shape: torch.Size, blocks: int) -> Part:
    columns = shape[-1]
    rows = shape.numel() // columns
    if rows % blocks:
        raise ValueError(f"{name} has {rows} rows, which its {blocks} heads do not divide")
    return Part(name, blocks, rows // blocks, columns)


def check_count(parts: list[Part], heads: dict[str, int], config: K3Config, optimizer: str) -> None:
    """The per-head blocks found must be those of the config: 3 matrices a KDA layer, 2 an MLA layer."""
    if optimizer != "per_head_muon":
        return
    kinds = config.layer_kinds
    expected = 3 * config.kda_num_heads * kinds.count("kda") + 2 * config.num_attention_heads * kinds.count("mla")
    found = sum(part.blocks for part in parts if part.name in heads)
    if found != expected:
        raise ValueError(f"found {found} per-head blocks for Muon, the config has {expected}")
