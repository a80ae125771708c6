"""Writing and reading `model/`: the released layout (model.md section 11), experts in bf16.

One shard a layer and one for the rest. bf16 everywhere but for the float32 list. This is what chat, serving and
other engines read; exact resuming goes through the masters in `state/` (train/state.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openk3.config import K3Config
from openk3.model.k3 import K3
from openk3.model.released import EXPERTS, PREFIX, Entry, is_f32, padded, text_entries

INDEX = "model.safetensors.index.json"
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def shard_name(shard: int, n_shards: int) -> str:
    return f"model-{shard:05d}-of-{n_shards:06d}.safetensors"


def shard_of(name: str, n_layers: int) -> int:
    """1-based shard: layer i in shard i + 1, everything else in the last."""
    layer, _, _ = name.removeprefix(PREFIX + "model.layers.").partition(".")
    return int(layer) + 1 if name.startswith(PREFIX + "model.layers.") else n_layers + 1


def to_released(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What one tensor of the model becomes on disk."""
    if EXPERTS in name:
        stem, _, matrix = name.rpartition(".")
        for e, expert in enumerate(tensor):
            yield f"{PREFIX}{stem}.{e}.{matrix}.weight", expert.to(torch.bfloat16)
    elif name.endswith("A_log"):
        yield PREFIX + name, torch.nn.functional.pad(tensor.float(), (0, padded(len(tensor)) - len(tensor)))
    else:
        yield PREFIX + name, tensor.to(torch.float32 if is_f32(name) else torch.bfloat16)


def save_model(model: K3, folder: Path) -> None:
    """Write `folder` (made if absent): shards, index, config.json, each synced to the disk.

    Raises OSError as the system gives it; whoever needs all or nothing writes into a sibling and renames.
    """
    folder.mkdir(parents=True, exist_ok=True)
    n_shards = model.config.num_hidden_layers + 1
    shards: dict[int, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        for released, value in to_released(name, tensor.detach().cpu()):
            shards.setdefault(shard_of(released, n_shards - 1), {})[released] = value.contiguous()
    weight_map, total = {}, 0
    for shard, tensors in sorted(shards.items()):
        file = shard_name(shard, n_shards)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=1) + "\n")
    for file in folder.iterdir():
        shutil.copymode(folder / "config.json", file)  # shards come with mode 600, whatever the umask
        with open(file, "rb") as f:
            os.fsync(f.fileno())


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_config(folder: Path) -> K3Config:
    """The config of a model folder. Raises ValueError saying what is wrong with it."""
    return K3Config.from_hf(read_json(folder / "config.json"))


def load_model(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> K3:
    """The model in `folder`, parameters and activations in `dtype` (the float32 list stays float32).

    Raises ValueError naming every tensor that is missing, unexpected, or of another shape or dtype.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = K3(config, compute_dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for name, tensor in model.named_parameters():
        tensor.data = tensor.data.to(wide if is_f32(name) else dtype)
    model.to_empty(device=device)
    tensors = read_tensors(folder, list(text_entries(config)))
    with torch.no_grad():
        for name, target in model.state_dict().items():
            fill(target, name, tensors)
    return model.eval()


def fill(target: Tensor, name: str, tensors: dict[str, Tensor]) -> None:
    """Copy one of the model's tensors from what the files hold, taking each out of `tensors`."""
    if EXPERTS in name:
        stem, _, matrix = name.rpartition(".")
        for e, expert in enumerate(target):
            expert.copy_(tensors.pop(f"{PREFIX}{stem}.{e}.{matrix}.weight"))
    else:
        target.copy_(tensors.pop(PREFIX + name)[: len(target)])  # A_log: the padding stays behind


def read_weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor, by name. Raises ValueError for an index that is something else."""
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map of file names")
    return weight_map


def read_tensors(folder: Path, entries: list[Entry]) -> dict[str, Tensor]:
    """All tensors of `entries`, checked against the index and the shards before any is used."""
    weight_map = read_weight_map(folder)
    expected = {entry.name: entry for entry in entries}
    faults = [f"missing {name}" for name in expected if name not in weight_map]
    faults += [f"unexpected {name}" for name in weight_map if name not in expected]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        try:
            with safe_open(folder / file, framework="pt") as shard:
                names = shard.keys()
                for name in names:
                    tensors[name] = shard.get_tensor(name)
        except FileNotFoundError:  # which is also what the reader says of a file it may not open
            how = "may not be read by this user" if (folder / file).exists() else "is absent"
            raise ValueError(f"the index of {folder} names {file}, which {how}") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / file} is damaged: {error}") from None
    for name, entry in expected.items():
        if name not in tensors:
            faults += [f"missing {name}"] if name in weight_map else []
        elif tensors[name].shape != entry.shape or tensors[name].dtype != TORCH_DTYPES[entry.dtype]:
            found = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            faults.append(f"{name} is {found}, not {entry.dtype} {list(entry.shape)}")
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise ValueError(f"{folder} does not hold the model its config describes: {shown}")
    return tensors
