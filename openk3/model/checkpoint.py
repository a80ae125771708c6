"""Writing and reading `model/`: the released layout (model.md section 11), routed experts in bf16 or in MXFP4.

One shard a layer and one for the rest. bf16 everywhere but for the float32 list. This is what chat, serving and other
engines read; exact resuming goes through the masters in `state/` (train/state.py). Both ways one tensor at a time: next
to the model itself there is never more than one tensor in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openk3 import disk
from openk3.model.container import DTYPES, Entry, Span, read, write
from openk3.model.files import CONFIG, INDEX, open_model
from openk3.model.k3 import K3
from openk3.model.released import EXPERTS, PREFIX, entries, is_f32, model_name, padded, refuse_unpackable, shard_of
from openk3.ops.mx import NAN_SCALE, dequantize_mxfp4, quantize_mxfp4

PACKED = ("weight_packed", "weight_scale")
Fetch = Callable[[Entry], Tensor]


def save_model(model: K3, folder: Path, *, packed: bool = False) -> None:
    """Write `folder` whole or not at all: shards, index, config.json. With `packed`, routed experts in MXFP4.

    Raises ValueError if something stands there already or the experts cannot be packed, Failure for a full disk.
    """
    save_folder(folder, lambda beside: write_model(model, beside, packed=packed))


def save_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """`disk.write_folder` for a folder that must be new. Raises ValueError, or Failure for a full disk."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; choose another name, or remove it first")
    with disk.disk_full_is_failure(folder.parent, lambda: f"{folder} was not written; free some space and try again"):
        disk.write_folder(folder, fill)


def write_model(model: K3, folder: Path, *, packed: bool = False) -> None:
    """Fill `folder`, made if absent. Raises as the system does; whoever needs all or nothing takes `save_model`."""
    if packed:
        refuse_unpackable(model.config)
    own = model.state_dict()

    def master(released: str) -> Tensor:
        name, expert = model_name(released)
        return own[name] if expert is None else own[name][expert]

    write_layout(folder, model.config.to_hf(packed=packed), entries(model.config, packed=packed), Encoder(master))


class Encoder:
    """What the layout wants of a tensor that is there in full: cast, padded, or packed.

    `full(name)` gives the tensor that a released `.weight` or float32 name stands for.
    """

    def __init__(self, full: Callable[[str], Tensor]):
        self.full = full
        self.last: tuple[str, tuple[Tensor, Tensor]] = "", (torch.empty(0), torch.empty(0))

    def __call__(self, entry: Entry) -> Tensor:
        stem, _, kind = entry.name.rpartition(".")
        if kind in PACKED:
            if self.last[0] != stem:  # values and scales are asked for one after the other
                try:
                    self.last = stem, quantize_mxfp4(self.full(f"{stem}.weight").detach())
                except ValueError as error:
                    raise ValueError(f"{stem}.weight cannot be packed: {error}") from None
            return self.last[1][PACKED.index(kind)]
        tensor = self.full(entry.name).detach()
        if kind == "A_log":
            tensor = torch.nn.functional.pad(tensor, (0, padded(len(tensor)) - len(tensor)))
        return tensor.to(DTYPES[entry.dtype])


def write_layout(
    folder: Path,
    hf: dict[str, Any],
    listed: Iterable[Entry],
    fetch: Fetch,
    show: Callable[[str, int, int], None] = lambda *_: None,
) -> None:
    """Shards, index and config.json of `hf`, asking `fetch` for one tensor at a time; `show` hears of each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    n_layers = hf["text_config"]["num_hidden_layers"]
    shards: dict[int, list[Entry]] = {}
    for entry in listed:
        shards.setdefault(shard_of(entry.name, n_layers), []).append(entry)
    weight_map, total = {}, 0
    for shard, held in sorted(shards.items()):
        show("shards", shard - 1, len(shards))
        file = f"model-{shard:05d}-of-{len(shards):06d}.safetensors"
        total += write(folder / file, held, fetch)
        weight_map |= {entry.name: file for entry in held}
    show("shards", len(shards), len(shards))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    (folder / CONFIG).write_text(json.dumps(hf, indent=1) + "\n")


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    parts: str = "text",
) -> K3:
    """The model in `folder`, parameters and activations in `dtype` (the float32 list stays float32), on `device`.

    Routed experts may lie there in bf16 or packed; a vision tower is checked and left where it is (`parts="text"` is
    all there is). Raises ValueError: for a folder that does not hold what its config says, before anything is loaded,
    and for a NaN or an infinity, by the tensor's name.
    """
    if parts != "text":
        raise ValueError(f"parts = {parts!r} cannot be loaded; the text model is what there is")
    source = open_model(folder)
    with torch.device("meta"):
        model = K3(source.config, compute_dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for name, tensor in model.named_parameters():
        tensor.data = tensor.data.to(wide if is_f32(name) else dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if EXPERTS in name:
                stem, _, matrix = name.rpartition(".")
                for e, expert in enumerate(target):
                    load_expert(source.spans, f"{PREFIX}{stem}.{e}.{matrix}", expert)
            elif name.endswith("A_log"):  # the padding stays behind
                target.copy_(read_finite(source.spans, PREFIX + name)[: len(target)])
            else:
                read_finite(source.spans, PREFIX + name, out=target)
    return model.eval()


def load_expert(spans: dict[str, Span], stem: str, target: Tensor) -> None:
    """One matrix of one expert, from bf16 or from MXFP4."""
    if f"{stem}.weight" in spans:
        read_finite(spans, f"{stem}.weight", out=target)
    else:
        target.copy_(unpacked(spans, stem, target.dtype))


def unpacked(spans: dict[str, Span], stem: str, dtype: torch.dtype) -> Tensor:
    """Packed values and scales in full. Raises ValueError naming the tensor whose scales are not finite."""
    values, scales = (read(spans[f"{stem}.{kind}"]) for kind in PACKED)
    refuse_nan_scales(f"{stem}.weight_scale", scales)
    try:
        return dequantize_mxfp4(values, scales, dtype)
    except ValueError as error:
        raise ValueError(f"{stem}.weight_packed cannot be unpacked: {error}") from None


def refuse_nan_scales(name: str, scales: Tensor) -> None:
    if (scales == NAN_SCALE).any():
        raise ValueError(f"{name} has a scale that is NaN (byte {NAN_SCALE})")


def read_finite(spans: dict[str, Span], name: str, *, part: int | None = None, out: Tensor | None = None) -> Tensor:
    """A tensor by name, as `container.read` gives it. Raises ValueError for a NaN or an infinity, also among scales."""
    tensor = read(spans[name], part=part, out=out)
    if name.endswith("weight_scale"):
        refuse_nan_scales(name, tensor)
    elif tensor.is_floating_point() and tensor.numel():
        low, high = torch.aminmax(tensor)  # needs no memory, and a NaN is in both
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ValueError(f"{name} in {spans[name].path} has a value that is not finite")
    return tensor
