"""Checkpoints in the release format: hub download, safetensors shards, FP8 and FP4 tensors, and the names of it all.

The modules are named after the release's keys, so only three things differ: routed experts are stacked here, one tensor
per expert there; hyper-connection tensors are `hc_attn_fn` there, `hc_attn.fn` here; the drafter's stages are `mtp.N`
there, `stages.N` here. Source of names and types: the files of the DeepSeek-V4-Flash-DSpark release.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafter import Drafter
from model import Config, Experts, Gate, Transformer
from packed import FP4_BLOCK, FP8_BLOCK, decode, pack

INDEX = "model.safetensors.index.json"
SMALL_FILES = ["config.json", "tokenizer.json", "calibration.json", INDEX]
FP8, FP4 = "F8_E4M3", "I8"  # as safetensors names what they are stored as; FP4 is two to a byte
SCALE_BLOCK = {FP8: FP8_BLOCK, FP4: FP4_BLOCK}


# ---- names and types -------------------------------------------------------------------------------------------------


def release_key(name: str, num_stages: int) -> str:
    """The release's name for a tensor of the target (num_stages 0) or the drafter, routed experts aside."""
    name = re.sub(r"(hc_\w+)\.(fn|base|scale)$", r"\1_\2", name).replace(".packed", ".weight")
    if num_stages:  # the drafter's input side is stored with the first stage, its output side with the last
        name = re.sub(r"^stages\.", "mtp.", name)
        name = re.sub(r"^main_", "mtp.0.main_", name)
        name = re.sub(r"^(norm|hc_head|markov_head|confidence_head)", rf"mtp.{num_stages - 1}.\1", name)
    return name


def release_views(module: Transformer | Drafter, num_stages: int = 0) -> dict[str, Tensor]:
    """The module's tensors under their release keys; one expert's tensors are views into the stacked ones."""
    views, first = {}, first_expert(module.config)
    for name, tensor in module.state_dict().items():
        key = release_key(name, num_stages)
        experts, _, stacked = key.rpartition("experts.")
        if stacked not in ("w13", "w2", "w13_scale", "w2_scale"):
            views[key] = tensor
            continue
        ending = "scale" if stacked.endswith("scale") else "weight"
        for e, matrix in enumerate(tensor, first):
            if stacked.startswith("w13"):
                views[f"{experts}experts.{e}.w1.{ending}"], views[f"{experts}experts.{e}.w3.{ending}"] = matrix.chunk(2)
            else:
                views[f"{experts}experts.{e}.w2.{ending}"] = matrix
    return views


def first_expert(config: Config) -> int:
    """The first of this process's routed experts."""
    return config.rank * config.n_routed_experts // config.world_size


def checkpoint_views(target: Transformer, drafter: Drafter | None) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its release key; embedding and head occur once, they are shared."""
    return release_views(target) | (release_views(drafter, len(drafter.stages)) if drafter else {})


def release_type(key: str) -> str:
    """What the release stores a tensor as."""
    if re.search(r"\.experts\.\d+\.", key):
        return FP4
    if key.endswith("tid2eid"):
        return "I64"
    if re.search(r"hc_\w+$|\.ape$|\.attn_sink$|gate\.bias$", key):
        return "F32"
    if re.search(r"norm\.weight$|^embed|^head|compressor|weights_proj|gate\.weight$|markov|confidence", key):
        return "BF16"
    return FP8


def release_format(config: Config, num_stages: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (type, shape) of every tensor of a checkpoint that is quantised as the release is."""
    with torch.device("meta"):
        target = Transformer(config)
        views = checkpoint_views(target, Drafter(config, num_stages, target) if num_stages else None)
    tensors = {}
    for key, view in views.items():
        kind, shape = release_type(key), tuple(view.shape)
        tensors[key] = kind, (*shape[:-1], shape[-1] // 2) if kind == FP4 else shape
        if kind in SCALE_BLOCK:
            tensors[scale_key(key)] = "F8_E8M0", scale_shape(kind, shape)
    return tensors


def scale_key(key: str) -> str:
    return key.removesuffix("weight") + "scale"


def scale_shape(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a matrix of `shape`, unpacked."""
    return tuple(math.ceil(n / block) for n, block in zip(shape, SCALE_BLOCK[kind]))


# ---- files -----------------------------------------------------------------------------------------------------------


def fetch(model: str, revision: str | None = None, weights: bool = True) -> Path:
    """The directory of a checkpoint: `model` itself, or a hub repository's files, downloaded where they are not cached.

    Without `weights` only the small files are fetched. Raises ValueError if there is no such thing or no way to get it.
    """
    if Path(model).is_dir():
        return Path(model)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ValueError(
            f"model is {model!r}, allowed: a directory, or a hub id like deepseek-ai/DeepSeek-V4-Flash-DSpark"
        )
    patterns = SMALL_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ValueError(
            f"model {model}: no such directory, and not from the hub: {str(error).splitlines()[0]}"
        ) from None


class Stored(NamedTuple):
    """Where a tensor of a checkpoint lies, from the headers alone."""

    path: Path
    kind: str  # safetensors' name of its type
    shape: tuple[int, ...]


def read_index(index: Path) -> dict[str, Path]:
    """Which file every tensor is in. Raises ValueError naming the index if it does not say."""
    try:
        return {key: index.parent / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: no weight_map of file names: {type(error).__name__}: {error}") from None


def assume_types(config: Config, listed: dict[str, Path]) -> dict[str, Stored]:
    """What will lie where when the files of an index have been downloaded: the release's types where there are scales."""
    num_stages = len({key.split(".")[1] for key in listed if key.startswith("mtp.")})
    types, stored = release_format(config, num_stages), {}
    for key, path in listed.items():
        kind, shape = types.get(key, ("F32", ()))
        if kind in SCALE_BLOCK and scale_key(key) not in listed:
            kind, shape = "BF16", (*shape[:-1], shape[-1] * (2 if kind == FP4 else 1))
        stored[key] = Stored(path, kind, shape)
    return stored


def read_headers(directory: Path) -> dict[str, Stored]:
    """All tensors of the checkpoint in DIRECTORY by name, from its one file or its shards. No tensor is read.

    Raises ValueError naming the file that is missing, damaged or not in the index, and the key that index and files
    disagree about.
    """
    index, paths, listed = directory / INDEX, [directory / "model.safetensors"], None
    if index.is_file():
        listed = read_index(index)
        paths = sorted(set(listed.values()))
    stored = {}
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        try:
            with safe_open(path, framework="pt") as file:
                for key in sorted(file.keys()):
                    if key in stored:
                        raise ValueError(f"{path}: {key} is in {stored[key].path.name}, too")
                    info = file.get_slice(key)
                    stored[key] = Stored(path, info.get_dtype(), tuple(info.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: {error}") from None
    if listed is not None:
        for key in sorted(listed.keys() | stored.keys()):
            if key not in stored or stored[key].path != listed.get(key, stored[key].path):
                raise ValueError(f"{index}: {key} is not in {listed[key].name}")
            if key not in listed:
                raise ValueError(f"{index}: {key} of {stored[key].path.name} is not listed")
    for path in sorted(set(directory.glob("*.safetensors")) - set(paths)):
        raise ValueError(f"{path}: not {'listed in ' + INDEX if listed else 'part of a checkpoint without ' + INDEX}")
    return stored


def check(stored: dict[str, Stored], views: dict[str, Tensor], directory: Path) -> None:
    """Raise ValueError unless the checkpoint has exactly the tensors `views`, and a scale beside each quantised one."""
    shapes = {key: tuple(view.shape) for key, view in views.items()}
    allowed = {}
    for key, view in views.items():
        allowed[key] = ("F32", "BF16", "F16") if view.is_floating_point() else ("I64", "I32")
        if view.is_floating_point() and view.dim() == 2:
            allowed[key] += (FP8, FP4)
        if key in stored and stored[key].kind in SCALE_BLOCK:
            shapes[scale_key(key)] = scale_shape(stored[key].kind, shapes[key])
            allowed[scale_key(key)] = ("F8_E8M0", "F32")
    for key, (path, kind, _) in stored.items():
        if key in allowed and kind not in allowed[key]:
            raise ValueError(f"{path}: {key} is stored as {kind}, supported: {', '.join(allowed[key])}")
    for what, keys in (("missing", shapes.keys() - stored.keys()), ("unexpected", stored.keys() - shapes.keys())):
        if keys:
            first = min(keys)
            where = stored[first].path if first in stored else directory
            raise ValueError(f"{where}: {len(keys)} {what} tensors, the first is {first}")
    for key, shape in shapes.items():
        path, kind, actual = stored[key]
        if kind == FP4:
            actual = (*actual[:-1], 2 * actual[-1])
        if actual != shape:
            raise ValueError(f"{path}: {key} has shape {list(actual)}, config.json says {list(shape)}")


# ---- whole checkpoints -----------------------------------------------------------------------------------------------


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give the linears, embeddings and experts `dtype`; norms, stream mixing, routing bias and sinks stay float32."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding | Experts):
            child.to(dtype)
        if isinstance(child, Gate):
            child.weight.data = child.weight.data.to(dtype)


def save_checkpoint(path: Path, target: Transformer, drafter: Drafter | None = None) -> None:
    """Write one safetensors file in the release format, in the modules' own types."""
    views = checkpoint_views(target, drafter)
    save_file({key: tensor.contiguous() for key, tensor in views.items()}, path, metadata={"format": "pt"})


def build(config: Config, keys: Iterable[str], dtype: torch.dtype) -> tuple[Transformer, Drafter | None]:
    """Modules without memory (on the meta device) for a checkpoint with tensors of these names.

    There are as many draft stages as `mtp.N` occur, and a confidence head if one does. Linears, embeddings and experts
    get `dtype`.
    """
    num_stages = len({key.split(".")[1] for key in keys if key.startswith("mtp.")})
    with torch.device("meta"):
        target = Transformer(config)
        drafter = Drafter(config, num_stages, target) if num_stages else None
    if drafter and not any("confidence_head" in key for key in keys):
        drafter.confidence_head = None
    for module in filter(None, (target, drafter)):
        cast(module.eval().requires_grad_(False), dtype)
    return target, drafter


def pack_as_stored(module: Transformer | Drafter, num_stages: int, stored: dict[str, Stored], dtype: torch.dtype):
    """Prepare the module's linears and experts for the quantised tensors that the checkpoint has for them."""
    fp8, fp4 = set(), set()
    for name in module.state_dict():
        key = release_key(name, num_stages)
        if key.endswith(".experts.w13"):
            if stored[f"{key.removesuffix('w13')}{first_expert(module.config)}.w1.weight"].kind == FP4:
                fp4.add(name.removesuffix(".w13"))
        elif key in stored and stored[key].kind == FP8:
            fp8.add(name.removesuffix(".weight"))
    pack(module, dtype, fp8, fp4)


def outline(
    directory: str | Path, dtype: torch.dtype, use_drafter: bool, group: tuple[int, int] = (0, 1), packed: bool = False
) -> tuple[dict[str, Stored], Transformer, Drafter | None]:
    """Where the checkpoint's tensors lie, and its modules without memory: all that can be known before loading.

    group: this process's rank and the number of processes; each has its share of the routed experts. packed: quantised
    weights stay as they are stored. Raises ValueError naming the file and the tensor that is missing, unexpected, of the
    wrong shape or type. Where only the index has been downloaded, types and shapes are assumed to be the release's.
    """
    directory = Path(directory)
    config, index = Config.load(directory), directory / INDEX
    if config.n_routed_experts % group[1]:
        allowed = f"a number that divides the {config.n_routed_experts} experts"
        raise ValueError(f"{group[1]} processes are running, allowed: {allowed}")
    if index.is_file() and not any(directory.glob("*.safetensors")):
        stored = assume_types(config, read_index(index))
    else:
        stored = read_headers(directory)
    stored = {key: where for key, where in stored.items() if use_drafter or not key.startswith("mtp.")}
    for what, pattern, said in (
        ("layers", r"layers\.(\d+)\.", config.num_hidden_layers),
        ("experts", r"layers\.\d+\.ffn\.experts\.(\d+)\.", config.n_routed_experts),
    ):  # before modules are built for as many as a wrong config may say
        there = len({found[1] for key in stored if (found := re.match(pattern, key))})
        if there < said:
            raise ValueError(f"{directory}: config.json says {said} {what}, there are tensors of {there}")
    check(stored, checkpoint_views(*build(config, stored, dtype)), directory)
    target, drafter = build(replace(config, rank=group[0], world_size=group[1]), stored, dtype)
    if drafter:
        drafter.calibration.load(directory)
    if packed:
        pack_as_stored(target, 0, stored, dtype)
        if drafter:
            pack_as_stored(drafter, len(drafter.stages), stored, dtype)
    return stored, target, drafter


def bytes_by_kind(target: Transformer, drafter: Drafter | None) -> dict[str, int]:
    """Bytes of the modules by kind, and of one sequence slot in their caches (allocated before, see allocate_cache)."""
    sizes = {"experts": 0, "other weights": 0, "drafter": 0, "cache per request": 0}
    for key, view in checkpoint_views(target, drafter).items():
        kind = "drafter" if key.startswith("mtp.") else "experts" if ".experts." in key else "other weights"
        sizes[kind] += view.nbytes
    for module in filter(None, (target, drafter)):
        sizes["cache per request"] += sum(cache.nbytes // len(cache) for cache in cache_buffers(module))
    return sizes


def cache_buffers(module: nn.Module) -> list[Tensor]:
    """All caches of the target or the drafter, one row per sequence slot."""
    names = ("kv_cache", "keys", "state_kv", "state_gate", "taps")
    return [buffer for name, buffer in module.named_buffers() if name.rsplit(".", 1)[-1] in names]


def free_memory(device: str) -> int | None:
    """Bytes, or None where nobody says."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        return 1024 * int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])
    except (OSError, TypeError):
        return None


def read(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)


def load_checkpoint(
    directory: str | Path,
    dtype: torch.dtype,
    device: str = "cpu",
    use_drafter: bool = True,
    group: tuple[int, int] = (0, 1),
    packed: bool | None = None,
) -> tuple[Transformer, Drafter | None]:
    """The target, and the drafter if the checkpoint has one and it is wanted, with their weights, on `device`.

    Linears, embeddings and experts get `dtype`. Quantised ones are decoded; with `packed`, the default on CUDA, they
    stay as they are stored. group and errors: see `outline`.
    """
    stored, target, drafter = outline(
        directory, dtype, use_drafter, group, device == "cuda" if packed is None else packed
    )
    for module in filter(None, (target, drafter)):
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    views = checkpoint_views(target, drafter)
    for path in sorted({where.path for where in stored.values()}):  # one shard at a time is mapped
        with safe_open(path, framework="pt") as file:
            for key in (key for key in views if stored[key].path == path):
                tensor = file.get_tensor(key)
                if stored[key].kind in SCALE_BLOCK and views[key].dtype.itemsize > 1:
                    beside = stored[scale_key(key)].path
                    scale = file.get_tensor(scale_key(key)) if beside == path else read(beside, scale_key(key))
                    tensor = decode(tensor, scale)
                views[key].copy_(tensor)
    return target, drafter
