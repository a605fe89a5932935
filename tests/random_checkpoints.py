"""Small random checkpoints in the release format, for tests."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from drafter import Drafter
from model import Config, Transformer
from weights import save_checkpoint

BASE = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "torch_dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 0, 0],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1024,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 32,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 16,
    "num_nextn_predict_layers": 1,
}


def randomise(module: torch.nn.Module) -> None:
    """Weights that keep activations near unit size and make every mechanism matter."""
    for name, p in module.named_parameters():
        if "embed" in name or name.startswith("head."):
            p.data.normal_(0, 1.0 if "embed" in name else 1.5 * p.shape[-1] ** -0.5)
        elif not p.is_floating_point():  # tid2eid
            experts = torch.rand(p.shape[0], module.config.n_routed_experts).argsort(1)
            p.data = experts[:, : p.shape[1]].contiguous()
        elif "norm" in name or name.endswith(".scale"):
            p.data.normal_(1, 0.2)
        elif p.dim() > 1:
            p.data.normal_(0, 1.5 * p.shape[-1] ** -0.5)
        else:
            p.data.normal_(0, 0.5)


def random_checkpoint(directory: Path, seed: int = 0, num_stages: int = 2, **changes) -> Path:
    """Write a float32 checkpoint of BASE with `changes`; the tokenizer knows words "t0" .. "t96". Returns directory."""
    torch.manual_seed(seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(BASE | changes))
    config = Config.load(directory)
    target = Transformer(config)
    randomise(target)
    drafter = None
    if num_stages:
        drafter = Drafter(config, num_stages, target)
        target.requires_grad_(False)
        randomise(drafter)
        proj = drafter.confidence_head.proj.weight.data  # confidences spread over (0, 1): saturated ones prove little
        proj[:, : config.hidden_size] *= 0.1
        proj[:, config.hidden_size :] *= 4
    save_checkpoint(directory / "model.safetensors", target, drafter)
    words = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
