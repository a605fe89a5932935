"""One command for a machine with a GPU: is the CUDA path right, and how near the hardware's limits is it?

    python gpu_check.py                          # at most eight minutes
    python gpu_check.py --device cpu --small     # the same steps on a CPU in a minute, to try the script itself

Three parts: small random models against the CPU's float32; a slice of V4-Flash with random weights, full width, FP8 and
FP4, as many layers as fit, with the time of a step beside the least that its bytes and its arithmetic allow; and the
sweep of policies on the embedded model.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

import bench
import engine as engine_module
from engine import DEFAULT_MODEL, Engine
from model import Config, Transformer
from weights import Stored, build, checkpoint_views, pack_as_stored, release_format

FLASH = Config(
    vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64, head_dim=512, qk_rope_head_dim=64,
    q_lora_rank=1024, o_lora_rank=1024, o_groups=8, moe_intermediate_size=2048, n_routed_experts=256,
    num_experts_per_tok=6, num_hash_layers=3, sliding_window=128, compress_ratios=[0, 0, *([4, 128] * 20), 4, 0, 0, 0],
    index_n_heads=64, index_head_dim=128, index_topk=512, hc_sinkhorn_iters=20, max_position_embeddings=4096,
    dspark_block_size=5, dspark_noise_token_id=128799, dspark_target_layer_ids=[40, 41, 42], dspark_markov_rank=256,
)  # fmt: skip
SMALL = replace(
    FLASH, vocab_size=1024, hidden_size=256, num_attention_heads=8, head_dim=64, qk_rope_head_dim=32, q_lora_rank=128,
    o_lora_rank=64, o_groups=4, moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2, index_n_heads=8,
    index_head_dim=32, dspark_noise_token_id=2, dspark_markov_rank=32,
)  # fmt: skip


def cut(config: Config, layers: int) -> Config:
    """The first `layers` layers and the draft stages, taps on the last three."""
    taps = [max(0, layers - i) for i in (3, 2, 1)]
    return replace(config, num_hidden_layers=layers, dspark_target_layer_ids=taps)


@torch.no_grad()
def random_model(config: Config, num_stages: int, device: str, dtype: torch.dtype):
    """Target and drafter on `device`, packed as the release is, with weights that keep activations near unit size."""
    stored = {key: Stored(Path(), *what) for key, what in release_format(config, num_stages).items()}
    target, drafter = build(config, stored, dtype)
    pack_as_stored(target, 0, stored, dtype)
    pack_as_stored(drafter, num_stages, stored, dtype)
    for module in (target, drafter):
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for key, view in checkpoint_views(target, drafter).items():
        if view.dtype == torch.int8:
            view.random_(-128, 128)
        elif view.dtype == torch.float8_e8m0fnu:  # FP4 values have a spread of 3, FP8 ones were drawn with 1
            fp4 = ".experts." in key
            width = view.shape[-1] * (32 if fp4 else 128)
            view.view(torch.uint8).fill_(127 - round(math.log2(width**0.5 * (3 if fp4 else 1))))
        elif view.dtype == torch.float8_e4m3fn:
            for rows in view.split(4096):  # no float32 copy of the whole
                rows.copy_(torch.randn(rows.shape, device=device))
        elif not view.is_floating_point():
            view.copy_(torch.rand(view.shape[0], config.n_routed_experts, device=device).argsort(1)[:, : view.shape[1]])
        elif "norm" in key or key.endswith("_scale"):
            view.fill_(1.0)
        else:
            view.normal_(0, view.shape[-1] ** -0.5 if view.dim() > 1 and "embed" not in key else 1.0)
    return target, drafter


@torch.inference_mode()
def check_correctness(device: str) -> None:
    """Prints how far logits and drafts on `device` are from those in float32 on the CPU, same packed weights."""
    config = cut(SMALL, 6)
    token = torch.randint(config.vocab_size, (300,), generator=torch.Generator().manual_seed(0))
    position = torch.arange(300)
    reference = random_model(config, 2, "cpu", torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.15)):
        modules = random_model(config, 2, device, dtype)
        results = []
        for (target, drafter), where in ((reference, "cpu"), (modules, device)):
            if where == device:
                target.load_state_dict(reference[0].state_dict())
                drafter.load_state_dict(reference[1].state_dict())
            target.allocate_cache(1, 512, 300)
            drafter.allocate_cache(1, 512, 300)
            t, p = token.to(where), position.to(where)
            logits, taps = target(t, p * 0, p, p)
            drafter.store(taps, p * 0, p)
            hidden, _ = drafter.run_block(t[:1], p[:1], p[-1:] + 1, 5)
            results.append([x.float().cpu() for x in (logits, hidden)])
        for what, expected, actual in zip(("logits", "drafter's hidden states"), *results):
            error = ((actual - expected).abs().mean() / expected.std()).item()
            verdict = "ok" if error < tolerance else f"WRONG, more than {tolerance}"
            print(f"{dtype}, {what}: mean difference {error:.2e} standard deviations: {verdict}")


def layers_that_fit(config: Config, memory: float) -> int:
    def size(layers):
        bytes_of = {"F32": 4, "I64": 8, "BF16": 2}
        tensors = release_format(cut(config, layers), 3).values()
        return sum(bytes_of.get(kind, 1) * math.prod(shape) for kind, shape in tensors)

    per_layer = (size(7) - size(5)) / 2
    return min(config.num_hidden_layers, int((memory - size(5)) / per_layer) + 5)


@contextmanager
def as_checkpoint(config: Config, device: str, dtype: torch.dtype) -> Iterator[str]:
    """A directory that Engine takes for a checkpoint; its weights come from `random_model`, not from a file."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(Path(DEFAULT_MODEL) / "tokenizer.json", directory)
        (Path(directory) / "config.json").write_text(json.dumps(asdict(config) | {"model_type": "deepseek_v4"}))
        modules = random_model(config, 3, device, dtype)
        before = engine_module.outline, engine_module.load_checkpoint
        engine_module.outline = lambda *args, **named: ({}, *build(config, release_format(config, 3), dtype))
        engine_module.load_checkpoint = lambda *args: modules
        engine_module.Engine.check_memory, check_memory = lambda *args: None, engine_module.Engine.check_memory
        try:
            yield directory
        finally:
            engine_module.outline, engine_module.load_checkpoint = before
            engine_module.Engine.check_memory = check_memory


def floors(target: Transformer, T: int, bandwidth: float, flops: float) -> tuple[float, float]:
    """ms that a step of T tokens must take to read the weights that it touches, and to multiply with them."""
    config = target.config
    share, E, k = 0.0, config.n_routed_experts, config.num_experts_per_tok
    touched = 1 - (1 - k / E) ** T  # of the routed experts, expected
    read = products = 0
    for key, view in checkpoint_views(target, None).items():
        share = touched if ".experts." in key else T / len(view) if key.startswith("embed") else 1
        read += min(share, 1) * view.nbytes
        if view.dim() == 2 and not key.startswith("embed") and view.dtype != torch.float8_e8m0fnu:
            width = 2 if view.dtype == torch.int8 else 1
            products += (k / E if ".experts." in key else 1) * view.numel() * width
    return read / bandwidth * 1e3, 2 * T * products / flops * 1e3


def check_speed(config: Config, device: str, bandwidth: float, flops: float) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    start = time.perf_counter()
    with as_checkpoint(config, device, dtype) as directory:
        name = "bfloat16" if device == "cuda" else "float32"
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 2048, "padded": True}
        engine = Engine(directory, device=device, dtype=name, **options)
        print(
            f"{config.num_hidden_layers} layers, ready after {time.perf_counter() - start:.0f} s; recorded sizes: ",
            end="",
        )
        print(f"{len(engine.forward.recorded)} of the target, {len(engine.draft.recorded)} of the drafter")
        print(f"{'tokens':>8} {'step ms':>9} {'bytes ms':>9} {'flops ms':>9}")
        for tokens, ms in engine.cost_table.verify_points:
            if tokens & (tokens - 1) == 0 or tokens % 64 == 0:
                print(
                    f"{tokens:8d} {ms:9.2f} "
                    + " ".join(f"{floor:9.2f}" for floor in floors(engine.target, tokens, bandwidth, flops))
                )
        for requests, ms in engine.cost_table.draft_points:
            if requests & (requests - 1) == 0:
                print(f"draft of {requests:3d} requests {ms:9.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a narrow model instead of V4-Flash's width")
    parser.add_argument(
        "--bandwidth", type=float, default=4.8e12, help="bytes per second of the memory (default: H200)"
    )
    parser.add_argument("--flops", type=float, default=989e12, help="bfloat16 operations per second (default: H200)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: CUDA is not available here")
    print("== correctness")
    check_correctness(args.device)
    print("== speed")
    memory = torch.cuda.mem_get_info()[0] if args.device == "cuda" else 8e9
    layers = 5 if args.small else layers_that_fit(FLASH, 0.75 * memory)
    check_speed(cut(SMALL if args.small else FLASH, layers), args.device, args.bandwidth, args.flops)
    print("== policies on the embedded model")
    few = ["--concurrency", "1", "64", "--policies", "adaptive", "none", "--rounds", "1", "--max-tokens", "32"]
    bench.main(["--device", args.device, *(few if args.small else ["--rounds", "2", "--max-tokens", "64"])])


if __name__ == "__main__":
    main()
