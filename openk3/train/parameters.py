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
    (r"self_attn\.kv_b_proj\.weight", "kv_heads"),
    (r"self_attn\.g_proj\.weight", "gate"),
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
    """Rows of one parameter that Muon sees as `blocks` equal matrices.

    The parameter, viewed as [blocks, stride, columns], holds the part in rows `start : start + rows` of each block.
    """

    name: str
    label: str  # key of its momentum in a checkpoint
    blocks: int
    stride: int
    start: int
    rows: int
    columns: int
    scale_shape: tuple[int, int]  # rows and columns the update scale is made of

    def of(self, tensor: Tensor) -> Tensor:
        """The part as a view [blocks, rows, columns] of the parameter, its gradient or its update."""
        return tensor.view(self.blocks, self.stride, self.columns)[:, self.start : self.start + self.rows]


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


def plan(
    parameters: Iterable[tuple[str, Tensor]],
    config: K3Config,
    *,
    optimizer: str = "per_head_muon",
    kv_b: str = "joint",
    gate_per_head: bool = False,
    scale: str = "block_rms",
) -> Plan:
    """Sort named parameters. Raises ValueError for an unknown name, a shape that its heads do not divide, or a
    number of per-head blocks other than the config's."""
    parts: list[Part] = []
    plain: dict[str, list[str]] = {"adamw": [], "adamw_undecayed": []}
    heads: dict[str, int] = {}
    for name, tensor in parameters:
        kind = treatment(name)
        if kind in ("heads", "kv_heads"):
            heads[name] = head_count(name, config)
        if kind in plain or optimizer == "adamw":
            plain["adamw_undecayed" if kind == "adamw_undecayed" else "adamw"].append(name)
            continue
        per_head = optimizer == "per_head_muon" and (
            kind in ("heads", "kv_heads") or (kind == "gate" and gate_per_head)
        )
        blocks = len(tensor) if kind == "experts" else head_count(name, config) if per_head else 1
        cuts = [config.qk_nope_head_dim] if per_head and kind == "kv_heads" and kv_b == "split" else []
        parts += split(name, tensor.shape, blocks, cuts, whole_scale=scale == "matrix_rms" and kind != "experts")
    check_count(parts, heads, config, optimizer, kv_b)
    return Plan(tuple(parts), tuple(plain["adamw"]), tuple(plain["adamw_undecayed"]), heads)


def split(name: str, shape: torch.Size, blocks: int, cuts: list[int], *, whole_scale: bool) -> list[Part]:
    """The parts of one parameter: its blocks whole, or cut at the given row of every block."""
    columns = shape[-1]
    total = shape.numel() // columns
    if total % blocks:
        raise ValueError(f"{name} has {total} rows, which its {blocks} heads do not divide")
    stride = total // blocks
    bounds = [0, *cuts, stride]
    parts = []
    for i, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows = stop - start
        scale_shape = (total, columns) if whole_scale else (rows, columns)
        label = f"{name}#{i}" if cuts else name
        parts.append(Part(name, label, blocks, stride, start, rows, columns, scale_shape))
    return parts


def check_count(parts: list[Part], heads: dict[str, int], config: K3Config, optimizer: str, kv_b: str) -> None:
    """The per-head blocks found must be those of the config: 3 matrices a KDA layer, 2 (or 3 parts) an MLA layer."""
    if optimizer != "per_head_muon":
        return
    kinds = config.layer_kinds
    in_mla = 3 if kv_b == "split" else 2
    expected = 3 * config.kda_num_heads * kinds.count("kda") + in_mla * config.num_attention_heads * kinds.count("mla")
    found = sum(part.blocks for part in parts if part.name in heads)
    if found != expected:
        raise ValueError(f"found {found} per-head blocks for Muon, the config has {expected}")
