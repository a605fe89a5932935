"""Weights that stay quantised in memory: the same numbers as decoded ones, and the CUDA kernel in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_release import GREEDY, quantised_checkpoint

from engine import Engine
from packed import PackedExperts, PackedLinear, decode, grouped_fp4_plain
from weights import load_checkpoint


def random_fp4(E, M, K, generator):
    packed = torch.randint(-128, 128, (E, M, K // 2), generator=generator).to(torch.int8)
    scale = torch.randint(120, 128, (E, M, K // 32), generator=generator).to(torch.uint8)
    return packed, scale.view(torch.float8_e8m0fnu)


SHAPES = [  # rows of every expert, K, M: empty experts, more rows than a tile, partial tiles in every direction
    ([3, 0, 5, 1], 64, 96),
    ([0, 0, 0, 2], 32, 64),
    ([40, 17, 0, 16], 160, 72),
    ([0, 0, 0, 0], 64, 64),
]


@pytest.mark.parametrize(("rows", "K", "M"), SHAPES)
def test_grouped_products_are_those_of_the_decoded_matrices(rows, K, M):
    generator = torch.Generator().manual_seed(0)
    packed, scale = random_fp4(len(rows), M, K, generator)
    x = torch.randn(sum(rows) + 3, K, generator=generator)
    ends = torch.tensor(rows).cumsum(0).int()
    expected = [
        x[i] @ decode(packed[e], scale[e]).T for i, e in enumerate(e for e, n in enumerate(rows) for _ in range(n))
    ]
    expected = torch.stack([*expected, *torch.zeros(3, M)])  # nothing behind the last end
    torch.testing.assert_close(grouped_fp4_plain(x, packed, scale, ends), expected, atol=1e-4, rtol=1e-5)


INTERPRETED = """
import torch
from packed import grouped_fp4_plain, grouped_fp4_triton
from test_packed import SHAPES, random_fp4
generator = torch.Generator().manual_seed(0)
for rows, K, M in SHAPES:
    packed, scale = random_fp4(len(rows), M, K, generator)
    x = torch.randn(sum(rows) + 3, K, generator=generator)
    ends = torch.tensor(rows).cumsum(0).int()
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 0.1)):  # the interpreter multiplies no bfloat16
        arguments = x.to(dtype), packed, scale, ends
        torch.testing.assert_close(grouped_fp4_triton(*arguments), grouped_fp4_plain(*arguments), atol=tolerance, rtol=1e-2)
"""


def test_the_kernel_in_the_interpreter_is_its_plain_twin():
    pytest.importorskip("triton")
    root = Path(__file__).parent.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}:{root / 'tests'}"}
    command = [sys.executable, "-c", INTERPRETED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert result.returncode == 0, result.stderr


def test_packed_modules_compute_what_decoded_ones_do(tmp_path):
    directory, _ = quantised_checkpoint(tmp_path, num_shards=2, hidden_size=160)
    modules = {packed: load_checkpoint(directory, torch.float32, packed=packed) for packed in (False, True)}
    kinds = [type(module) for module in modules[True][0].modules()] + [type(m) for m in modules[True][1].modules()]
    assert kinds.count(PackedExperts) == 4 + 2 and kinds.count(PackedLinear) > 30
    tokens, position = torch.randint(97, (40,)), torch.arange(40)
    results = []
    for target, drafter in modules.values():
        target.allocate_cache(1, 64, 64)
        drafter.allocate_cache(1, 64, 64)
        with torch.inference_mode():
            logits, taps = target(tokens, position * 0, position, position)
            drafter.store(taps, position * 0, position)
            results.append((logits, *drafter.run_block(tokens[:1], position[:1], position[-1:] + 1, 5)))
    for decoded, packed in zip(*results):
        torch.testing.assert_close(packed, decoded, atol=1e-4, rtol=1e-4)
    size = sum(t.nbytes for t in modules[True][0].state_dict().values())
    assert size < 0.6 * sum(t.nbytes for t in modules[False][0].state_dict().values())


def test_an_engine_runs_on_packed_weights(tmp_path, monkeypatch):
    directory, _ = quantised_checkpoint(tmp_path)
    outputs = []
    for packed in (False, True):
        monkeypatch.setattr(
            "engine.load_checkpoint", lambda *args, packed=packed: load_checkpoint(*args, packed=packed)
        )
        engine = Engine(str(directory), max_num_seqs=2, max_model_len=64)
        outputs.append([c.token_ids for c in engine.generate([[5, 6], [7]], GREEDY)])
    assert outputs[0] == outputs[1]
