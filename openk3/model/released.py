"""The released layout as data: the name, dtype and shape of every tensor on disk (model.md section 11).

The table is read off the model itself on the meta device, so it cannot drift from it: stacked experts become one
tensor each, A_log is padded, and the float32 list is applied. The vision tower's table stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from openk3.config import A_LOG_PADDING, MX_BLOCK, VISION, K3Config
from openk3.model.container import Entry
from openk3.model.k3 import K3

PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
F32_SUFFIXES = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
EXPERTS = "block_sparse_moe.experts."


def is_f32(name: str) -> bool:
    """Whether the released file keeps this tensor in float32 (pitfall 7)."""
    return name.endswith(F32_SUFFIXES)


def padded(n: int) -> int:
    return -(-n // A_LOG_PADDING) * A_LOG_PADDING


def meta_model(config: K3Config) -> K3:
    """The model without memory behind its parameters."""
    with torch.device("meta"):
        return K3(config)


def text_entries(config: K3Config, *, packed: bool = False) -> Iterator[Entry]:
    """Tensors of the text model; `packed` gives routed experts in MXFP4, as K3 is shipped."""
    for name, tensor in meta_model(config).state_dict().items():
        shape = tuple(tensor.shape)
        if EXPERTS in name:
            yield from _expert_entries(PREFIX + name, shape, packed)
        elif name.endswith("A_log"):
            yield Entry(PREFIX + name, "F32", (padded(shape[0]),))
        else:
            yield Entry(PREFIX + name, "F32" if is_f32(name) else "BF16", shape)


def _expert_entries(name: str, shape: tuple[int, ...], packed: bool) -> Iterator[Entry]:
    stem, _, matrix = name.rpartition(".")
    n_experts, rows, columns = shape
    for e in range(n_experts):
        if packed:
            yield Entry(f"{stem}.{e}.{matrix}.weight_packed", "U8", (rows, columns // 2))
            yield Entry(f"{stem}.{e}.{matrix}.weight_scale", "U8", (rows, columns // MX_BLOCK))
        else:
            yield Entry(f"{stem}.{e}.{matrix}.weight", "BF16", (rows, columns))


def vision_entries(hidden_size: int) -> Iterator[Entry]:
    """MoonViT-V2 and the projector onto a text model of `hidden_size` (model.md section 10)."""
    tower = "vision_tower."
    width, qkv, inner = (VISION[name] for name in ("vt_hidden_size", "qkv_hidden_size", "vt_intermediate_size"))
    patch, height = VISION["patch_size"], VISION["init_pos_emb_height"]
    yield Entry(tower + "patch_embed.proj.weight", "BF16", (width, 3, patch, patch))
    yield Entry(tower + "patch_embed.pos_emb.weight", "BF16", (height, VISION["init_pos_emb_width"], width))
    for b in range(VISION["vt_num_hidden_layers"]):
        block = f"{tower}encoder.blocks.{b}."
        yield Entry(block + "norm0.weight", "BF16", (width,))
        yield Entry(block + "norm1.weight", "BF16", (width,))
        yield Entry(block + "wqkv.weight", "BF16", (3 * qkv, width))
        yield Entry(block + "wo.weight", "BF16", (width, qkv))
        yield Entry(block + "mlp.fc0.weight", "BF16", (inner, width))
        yield Entry(block + "mlp.fc1.weight", "BF16", (width, inner))
    yield Entry(tower + "encoder.final_layernorm.weight", "BF16", (width,))
    merged = 4 * width
    yield Entry("mm_projector.proj.0.weight", "BF16", (merged, merged))
    yield Entry("mm_projector.proj.2.weight", "BF16", (hidden_size, merged))
    yield Entry("mm_projector.post_norm.weight", "BF16", (hidden_size,))


def entries(config: K3Config, *, packed: bool = False, vision: bool = False) -> list[Entry]:
    """All tensors of a model folder."""
    return [*text_entries(config, packed=packed), *(vision_entries(config.hidden_size) if vision else ())]


def shard_of(name: str, n_layers: int) -> int:
    """1-based shard: layer i in shard i + 1, then what stands outside the layers, the projector, the tower."""
    if name.startswith(PREFIX + "model.layers."):
        return int(name.removeprefix(PREFIX + "model.layers.").partition(".")[0]) + 1
    return n_layers + {"mm_projector": 2, "vision_tower": 3}.get(name.partition(".")[0], 1)


def model_name(released: str) -> tuple[str, int | None]:
    """A released tensor's name in the model, and for a routed expert its place in the stack."""
    name = released.removeprefix(PREFIX)
    if EXPERTS not in name:
        return name, None
    stem, _, rest = name.partition(EXPERTS)
    expert, matrix, _ = rest.split(".")
    return f"{stem}{EXPERTS}{matrix}", int(expert)


def refuse_unpackable(config: K3Config) -> None:
    """Raises ValueError if a routed expert's inputs do not divide into MXFP4's groups."""
    widths = {"expert_width": config.expert_width, "moe_intermediate_size": config.moe_intermediate_size}
    for name, width in widths.items():
        if width % MX_BLOCK:
            raise ValueError(f"experts cannot be packed: {name} = {width} is not a multiple of {MX_BLOCK}, the inputs "
                             "that share a scale in MXFP4")  # fmt: skip
