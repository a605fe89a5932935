"""The release format: what is written can be read, and what does not fit is named before anything is loaded."""

import pytest
import torch
from random_checkpoints import random_checkpoint
from safetensors.torch import load_file, save_file

from engine import Engine, SamplingParams
from weights import checkpoint_views, load_checkpoint


def rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("num_stages", [0, 1, 3])
def test_round_trip(num_stages, tmp_path):
    directory = random_checkpoint(tmp_path, num_stages=num_stages)
    target, drafter = load_checkpoint(directory, torch.float32)
    assert (drafter is None) if num_stages == 0 else len(drafter.stages) == num_stages
    stored = load_file(directory / "model.safetensors")
    views = checkpoint_views(target, drafter)
    assert views.keys() == stored.keys()
    assert all(torch.equal(views[key], stored[key]) for key in stored)


def test_release_keys(tmp_path):
    """The names of the release, spelt out for the parts that are named differently in the modules."""
    keys = load_file(random_checkpoint(tmp_path, num_stages=2) / "model.safetensors").keys()
    layer = {
        "hc_attn_fn hc_attn_base hc_attn_scale hc_ffn_fn hc_ffn_base hc_ffn_scale attn_norm.weight ffn_norm.weight",
        "attn.wq_a.weight attn.wq_b.weight attn.wkv.weight attn.wo_a.weight attn.wo_b.weight attn.attn_sink",
        "attn.q_norm.weight attn.kv_norm.weight ffn.gate.weight ffn.experts.3.w1.weight ffn.experts.0.w2.weight",
        "ffn.experts.1.w3.weight ffn.shared_experts.w1.weight ffn.shared_experts.w2.weight",
    }
    for name in " ".join(layer).split():
        assert f"layers.1.{name}" in keys and f"mtp.1.{name}" in keys
    compressed = "compressor.wkv.weight compressor.wgate.weight compressor.norm.weight compressor.ape"
    for name in f"{compressed} indexer.wq_b.weight indexer.weights_proj.weight indexer.compressor.ape".split():
        assert f"layers.1.attn.{name}" in keys and f"mtp.0.attn.{name}" not in keys
    single = "embed.weight head.weight norm.weight hc_head_fn hc_head_base hc_head_scale layers.0.ffn.gate.tid2eid"
    drafter = "0.main_proj.weight 0.main_norm.weight 1.norm.weight 1.hc_head_fn 1.markov_head.markov_w1.weight"
    drafter += " 1.markov_head.markov_w2.weight 1.confidence_head.proj.weight 0.ffn.gate.bias"
    assert keys >= set(single.split()) | {f"mtp.{name}" for name in drafter.split()} | {"layers.3.ffn.gate.bias"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.2.attn.wkv.weight"), r"1 missing tensors, the first is layers\.2\.attn\.wkv\.weight"),
        (lambda t: t.pop("mtp.1.norm.weight"), r"missing.*mtp\.1\.norm\.weight"),
        (lambda t: t.update({"layers.9.x": torch.zeros(1)}), r"1 unexpected tensors, the first is layers\.9\.x"),
        (lambda t: t.update({"head.weight": torch.zeros(3, 64)}), r"head\.weight has shape \[3, 64\].*\[97, 64\]"),
        (lambda t: t.update({"head.weight": t["head.weight"].to(torch.float8_e4m3fn)}), r"1 missing.*head\.scale"),
    ],
)
def test_wrong_tensors_are_named(change, message, tmp_path):
    directory = random_checkpoint(tmp_path)
    rewrite(directory, change)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(directory, torch.float32)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ('{"model_type": "llama"}', "'llama'"), ('{"model_type": "deepseek_v4"}', "vocab_size")],
)
def test_wrong_configs_are_named(text, message, tmp_path):
    directory = random_checkpoint(tmp_path)
    (directory / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(directory, torch.float32)


def test_a_damaged_file_is_named(tmp_path):
    directory = random_checkpoint(tmp_path)
    (directory / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="model.safetensors"):
        load_checkpoint(directory, torch.float32)


def test_a_checkpoint_without_drafter_runs_without_speculation(tmp_path):
    directory = random_checkpoint(tmp_path, num_stages=0)
    engine = Engine(str(directory), max_num_seqs=1, max_model_len=64)
    assert engine.gamma == 0
    assert len(engine.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(ValueError, match="has no drafter"):
        Engine(str(directory), num_speculative_tokens=3)
