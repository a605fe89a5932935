"""The embedded checkpoint: transformers reads it, and continues prompts as the engine does."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_model import reference_logits
from transformers import AutoModelForCausalLM

from engine import DEFAULT_MODEL, Engine, SamplingParams
from model import Config
from train import held_out_prompts


def test_size_and_mechanisms():
    config = Config.load(DEFAULT_MODEL)
    assert {0, 4, 128} <= set(config.compress_ratios[: config.num_hidden_layers])
    assert 0 < config.num_hash_layers < config.num_hidden_layers
    assert config.n_shared_experts and config.dspark_markov_rank and config.hc_mult > 1
    assert config.index_topk < config.max_position_embeddings // 4  # the indexer has something to choose
    assert sum(file.stat().st_size for file in Path(DEFAULT_MODEL).iterdir()) <= 15e6


def stable_topk(x, k, dim=-1, **_):
    """Tensor.topk with ties going to the lower index."""
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return SimpleNamespace(values=values[..., :k], indices=indices[..., :k])


def test_transformers_reads_it_and_agrees_on_logits(monkeypatch):
    """Past index_topk * 4 positions the indexer has to choose, and its relu scores tie at exactly zero. torch.topk then

    picks by the layout of its input, which differs here and there, so the tie is broken alike on both sides.
    """
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
    engine = Engine(max_num_seqs=1, num_speculative_tokens=0)
    prompt = torch.tensor(held_out_prompts(1, seed=5, length=600))
    position = torch.arange(prompt.shape[1])
    engine.target.allocate_cache(1, 1024, 1024)
    with torch.inference_mode():
        actual, _ = engine.target(prompt[0], position * 0, position, position)
    expected = reference_logits(DEFAULT_MODEL, prompt)[0]  # asserts: no missing and no unexpected key
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_greedy_continuation_is_that_of_transformers():
    prompts = [held_out_prompts(1, seed=i, length=40)[0] for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    outputs = [c.token_ids for c in Engine(max_num_seqs=6).generate(prompts, params)]
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()
    tokens = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(48):
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert outputs == tokens[:, 40:].tolist()


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_logprobs_are_those_of_transformers(acceptance):
    prompts = [held_out_prompts(1, seed=i, length=20 + i)[0] for i in range(6)]
    wanted = [(0, 5), (1, 0), (1, 1), (0.5, 3), (1, None), (2, 20)]
    params = [SamplingParams(t, 40, ignore_eos=True, top_k=50, logprobs=n) for t, n in wanted]
    engine = Engine(max_num_seqs=6, acceptance=acceptance)
    completions = engine.generate(prompts, params)
    assert engine.stats.accepted.sum() > 20  # accepted drafts have theirs, too
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()
    for c, p in zip(completions, params):
        if p.logprobs is None:
            assert c.logprobs is None
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([c.prompt_token_ids + c.token_ids]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(c.prompt_token_ids) - 1 : -1]
        assert [entry["token_id"] for entry in c.logprobs] == c.token_ids
        for entry, row in zip(c.logprobs, expected):
            assert entry["logprob"] == pytest.approx(row[entry["token_id"]].item(), abs=1e-3)
            best = row.topk(p.logprobs).values.tolist()
            assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(best, abs=1e-3)
            assert [row[top["token_id"]].item() for top in entry["top_logprobs"]] == pytest.approx(best, abs=1e-3)
