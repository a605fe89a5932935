"""Checkpoints in the release format: config.json and safetensors, keys as in the DeepSeek-V4 + DSpark release.

The modules are named after the release's keys, so only three things differ: routed experts are stacked here, one tensor
per expert there; hyper-connection tensors are `hc_attn_fn` there, `hc_attn.fn` here; the drafter's stages are `mtp.N`
there, `stages.N` here.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafter import Drafter
from model import Config, Experts, Gate, Transformer


def release_views(module: nn.Module, num_stages: int = 0) -> dict[str, Tensor]:
    """The module's tensors under their release keys; one expert's tensors are views into the stacked ones."""
    views = {}
    for name, tensor in module.state_dict().items():
        name = re.sub(r"(hc_\w+)\.(fn|base|scale)$", r"\1_\2", name)
        if num_stages:  # a drafter: its input side is stored with the first stage, its output side with the last
            name = re.sub(r"^stages\.", "mtp.", name)
            name = re.sub(r"^main_", "mtp.0.main_", name)
            name = re.sub(r"^(norm|hc_head|markov_head|confidence_head)", rf"mtp.{num_stages - 1}.\1", name)
        if name.endswith("experts.w13"):
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                views[f"{name[:-3]}{e}.w1.weight"], views[f"{name[:-3]}{e}.w3.weight"] = gate, up
        elif name.endswith("experts.w2"):
            views |= {f"{name[:-2]}{e}.w2.weight": t for e, t in enumerate(tensor)}
        else:
            views[name] = tensor
    return views


def checkpoint_views(target: Transformer, drafter: Drafter | None) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its release key; embedding and head occur once, they are shared."""
    return release_views(target) | (release_views(drafter, len(drafter.stages)) if drafter else {})


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


def load_checkpoint(
    directory: str | Path, dtype: torch.dtype, device: str = "cpu", use_drafter: bool = True
) -> tuple[Transformer, Drafter | None]:
    """Build the target, and the drafter if the checkpoint has one and it is wanted, from DIRECTORY.

    Linears, embeddings and experts get `dtype`. Raises ValueError naming the file and the tensor that is missing,
    unexpected, wrongly shaped or quantised, before any tensor is read.
    """
    path = Path(directory) / "model.safetensors"
    config = Config.load(directory)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None
    with file:
        stored = set(file.keys())
        num_stages = len({key.split(".")[1] for key in stored if key.startswith("mtp.")})
        with torch.device(device):
            target = Transformer(config)
            drafter = Drafter(config, num_stages, target) if num_stages and use_drafter else None
        for module in filter(None, (target, drafter)):
            module.requires_grad_(False)
            cast(module.eval(), dtype)
        views = checkpoint_views(target, drafter)
        if not use_drafter:
            stored = {key for key in stored if not key.startswith("mtp.")}
        for what, keys in (("missing", views.keys() - stored), ("unexpected", stored - views.keys())):
            if keys:
                raise ValueError(f"{path}: {len(keys)} {what} tensors, the first is {min(keys)}")
        for key, view in views.items():
            info = file.get_slice(key)
            if info.get_dtype() not in ("F32", "BF16", "F16", "I64"):
                raise ValueError(f"{path}: {key} is {info.get_dtype()}; quantised checkpoints are not supported yet")
            if tuple(info.get_shape()) != tuple(view.shape):
                raise ValueError(f"{path}: {key} has shape {info.get_shape()}, config.json says {list(view.shape)}")
        for key, view in views.items():
            view.copy_(file.get_tensor(key))
    if drafter:
        drafter.calibration.load(Path(directory))
    return target, drafter
