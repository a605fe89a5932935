"""Compiled layers and drafts: the same outputs, from graphs that are made once."""

import random

import pytest
import torch
from random_checkpoints import random_checkpoint

from engine import Engine, SamplingParams
from profile_costs import CostTable

META = {"device": "cpu", "dtype": "float32", "model": "m", "mode": "compiled", "context_len": 8}
TABLE = CostTable(META, [(1, 1.5), (8, 3.0)], [(1, 10.0), (8, 11.0), (48, 30.0)])
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 200, "cost_table": TABLE}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    changes = {
        "num_hidden_layers": 1,
        "compress_ratios": [4, 0],
        "dspark_target_layer_ids": [0],
        "hc_sinkhorn_iters": 2,
    }
    return str(random_checkpoint(tmp_path_factory.mktemp("model"), num_stages=1, **changes))


def test_compiled_output_is_the_eager_output(model):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(length)] for length in (1, 7, 40, 90, 130, 2)]
    params = [SamplingParams(temperature=float(i % 2), max_tokens=40, ignore_eos=True) for i in range(len(prompts))]
    eager, compiled = (
        Engine(model, adaptive_verification=False, compile=compile, **OPTIONS) for compile in (False, True)
    )
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for at_once in (1, 4):
        expected = eager.generate(prompts, params, concurrency=at_once)
        assert compiled.generate(prompts, params, concurrency=at_once) == expected
    assert compiled.compiled and num_graphs == 2  # the layer and the drafter
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs


def test_without_a_compiler_it_runs_eagerly_and_says_so(model, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = Engine(model, compile=True, **OPTIONS)
    assert "no C++ compiler 'no-such-compiler'" in capsys.readouterr().err
    assert not engine.compiled and engine.generate([[5, 6]], SamplingParams(max_tokens=4))[0].token_ids
