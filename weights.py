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

from model import Config, Experts, Gate, Transformer


def release_views(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The module's tensors under their release keys; experts and the like are views into the stacked tensors."""
    views = {}
    for name, tensor in module.state_dict(prefix=prefix).items():
        name = re.sub(r"(hc_\w+)\.(fn|base|scale)$", r"\1_\2", name)
        name = re.sub(r"^stages\.(\d+)\.", r"mtp.\1.", name)
        if name.endswith("experts.w13"):
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                views[f"{name[:-3]}{e}.w1.weight"], views[f"{name[:-3]}{e}.w3.weight"] = gate, up
        elif name.endswith("experts.w2"):
            views |= {f"{name[:-2]}{e}.w2.weight": t for e, t in enumerate(tensor)}
        else:
            views[name] = tensor
    return views


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give the linears, embeddings and experts `dtype`; norms, mixing, gates' biases and sinks stay float32."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding | Experts):
            child.to(dtype)
        if isinstance(child, Gate):
            child.weight.data = child.weight.data.to(dtype)


def save_checkpoint(path: Path, *modules: nn.Module) -> None:
    """Write the modules' tensors to one safetensors file in the release format."""
    views = {k: t.contiguous() for module in modules for k, t in release_views(module).items()}
    save_file(views, path, metadata={"format": "pt"})
