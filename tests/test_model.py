"""The target against Hugging Face transformers: same checkpoint, same tokens, logits at every position."""

import pytest
import torch
from random_checkpoints import random_checkpoint
from transformers import AutoModelForCausalLM

from weights import load_checkpoint

LENGTH = 640  # past position 512, five windows of ratio 128, many wrap-arounds of every ring
MAX_CHUNK = 24

SHAPES = {
    "base": {},
    "all-compressed": {"compress_ratios": [4, 128, 4, 4, 0], "num_hash_layers": 2, "dspark_target_layer_ids": [0, 3]},
    "no-compression": {"compress_ratios": [0, 0, 0, 0, 0], "sliding_window": 40, "hc_sinkhorn_iters": 1},
    "many-experts": {"n_routed_experts": 16, "num_experts_per_tok": 6, "num_hash_layers": 2, "hc_sinkhorn_iters": 20},
    "plain-rope": {"rope_scaling": None, "sliding_window": 7, "compress_ratios": [128, 4, 0, 128], "index_topk": 160},
    "deep": {"num_hidden_layers": 7, "compress_ratios": [0, 0, 4, 128, 4, 128, 0], "index_topk": 48, "o_groups": 4},
}


def reference_logits(directory, tokens):
    """[B, S, V] of transformers; asserts that it found every tensor and no other."""
    reference, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        return reference.eval()(tokens, use_cache=False).logits


@torch.no_grad()
def chunked_logits(target, tokens, max_chunk, rejected, seed):
    """Feed sequences [B, S] in random chunks, one sequence per slot, with random rejected tokens after every chunk."""
    B, S = tokens.shape
    generator = torch.Generator().manual_seed(seed)

    def random(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    logits = torch.empty(B, S, target.config.vocab_size)
    done = [0] * B
    while min(done) < S:
        step_token, step_slot, step_position, keep = [], [], [], []
        for b in range(B):
            length = min(random(1, max_chunk - rejected + 1), S - done[b])
            wrong = min(random(0, rejected + 1), S - done[b] - length)  # drafts behind the chunk that will be rejected
            junk = torch.randint(target.config.vocab_size, (wrong,), generator=generator)
            step_token.append(torch.cat([tokens[b, done[b] : done[b] + length], junk]))
            step_slot.append(torch.full((length + wrong,), b))
            step_position.append(torch.arange(done[b], done[b] + length + wrong))
            keep.append((b, done[b], length, wrong))
            done[b] += length
        token = torch.cat(step_token)
        out, _ = target(token, torch.cat(step_slot), torch.cat(step_position), torch.arange(len(token)))
        row = 0
        for b, first, length, wrong in keep:
            logits[b, first : first + length] = out[row : row + length]
            row += length + wrong
    return logits


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name, tmp_path):
    directory = random_checkpoint(tmp_path, seed=len(name), num_stages=0, **SHAPES[name])
    target, _ = load_checkpoint(directory, torch.float32)
    tokens = torch.randint(target.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(directory, tokens)
    assert expected.std() > 0.5
    target.allocate_cache(num_slots=2, max_len=LENGTH, max_chunk=MAX_CHUNK)
    actual = chunked_logits(target, tokens, MAX_CHUNK, rejected=7, seed=2)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_groups_share_keys_without_changing_anything(tmp_path):
    target, _ = load_checkpoint(random_checkpoint(tmp_path, num_stages=0), torch.float32)
    token, seq_slot, position = torch.randint(97, (512,)), torch.zeros(512, dtype=torch.int64), torch.arange(512)
    results = []
    for group in (1, 64):
        target.allocate_cache(1, 512, 512)
        with torch.no_grad():
            results.append(target(token, seq_slot, position, position, group=group))
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=0)


def test_padding_in_the_scratch_slot_changes_nothing(tmp_path):
    target, _ = load_checkpoint(random_checkpoint(tmp_path, num_stages=0), torch.float32)
    token, seq_slot, position = torch.randint(97, (16,)), torch.zeros(16, dtype=torch.int64), torch.arange(16)
    scratch = 1  # with one slot allocated, the row behind it
    target.allocate_cache(1, 64, 32)
    with torch.no_grad():
        plain, _ = target(token, seq_slot, position, position)
        target.allocate_cache(1, 64, 32)
        pad = torch.zeros(5, dtype=torch.int64)
        padded, _ = target(
            torch.cat([token, pad]), torch.cat([seq_slot, pad + scratch]), torch.cat([position, pad]), position
        )
    torch.testing.assert_close(plain, padded, atol=1e-5, rtol=0)


def test_taps_are_the_mean_streams_of_the_named_layers_in_order(tmp_path):
    target, _ = load_checkpoint(
        random_checkpoint(tmp_path, num_stages=0, dspark_target_layer_ids=[3, 0]), torch.float32
    )
    streams = {}
    for i, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda module, args, out, i=i: streams.__setitem__(i, out))
    target.allocate_cache(1, 64, 32)
    position = torch.arange(8)
    with torch.no_grad():
        _, taps = target(position + 3, position * 0, position, position)
    torch.testing.assert_close(taps, torch.cat([streams[3].mean(1), streams[0].mean(1)], dim=1))


def test_experts_in_training_mode_compute_the_same(tmp_path):
    target, _ = load_checkpoint(random_checkpoint(tmp_path, num_stages=0), torch.float32)
    moe, x, token = target.layers[2].ffn, torch.randn(33, 64), torch.randint(97, (33,))
    with torch.no_grad():
        torch.testing.assert_close(moe.train()(x, token), moe.eval()(x, token), atol=1e-5, rtol=1e-5)
