"""Trains the embedded checkpoint on a CPU, from text that every Python has: the standard library's own sources.

    python train.py --target     # the DeepSeek-V4 target, from scratch            (resumes if it was interrupted)
    python train.py --drafter    # the DSpark drafter, the target frozen           (resumes if it was interrupted)
    python train.py --calibrate  # confidence temperatures, fitted on held-out generations
    python train.py --evaluate   # everything the README states about the checkpoint

Nothing of the text is stored: it is read at run time, and files are held out by a hash of their path. Weights are trained
in bfloat16 with float32 masters, so what is saved is exactly what was trained. Muon moves the matrices (as DeepSeek-V4's
own training does), AdamW the rest.
"""

import argparse
import functools
import hashlib
import json
import math
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from drafter import Drafter, calibration_features, expected_calibration_error, fit_calibration
from model import Config, MoE, Transformer
from weights import cast, load_checkpoint, save_checkpoint

CHECKPOINT = Path(__file__).parent / "checkpoints" / "tiny"
SPECIAL_TOKENS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
]
NOISE_TOKEN = "<｜noise｜>"
SEQUENCE, GROUP = 512, 64  # tokens per training sequence; neighbours that share a key fetch

CONFIG = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 96,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_intermediate_size": 160,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 64,
    "compress_ratios": [0, 4, 128, 4, 0, 4, 128, 0, 0],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 2,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1024,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": len(SPECIAL_TOKENS),
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 64,
}


def documents() -> Iterator[tuple[bool, str, str]]:
    """(held out, name, text) of every module of the standard library and of every topic of its built-in help."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [(p.relative_to(root).as_posix(), p) for p in sorted(root.rglob("*.py"))]
    for name, path in found:
        if name.startswith(("site-packages/", "encodings/", "pydoc_data/")):
            continue
        try:
            yield held_out(name), name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield held_out(name), f"help/{name}", text


def held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 25 == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[*SPECIAL_TOKENS, NOISE_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in one row of tokens, each opened by bos and closed by eos."""
    bos, eos = CONFIG["bos_token_id"], CONFIG["eos_token_id"]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.array([token for e in encoded for token in (bos, *e.ids, eos)], dtype=np.uint16)


@functools.cache
def held_out_texts(kind: str = "all") -> list[str]:
    """Held-out documents: "code" (modules), "prose" (help topics) or "all"."""
    found = [(name, text) for held, name, text in documents() if held]
    return [text for name, text in found if kind == "all" or name.startswith("help/") == (kind == "prose")]


def load_corpus(out: Path) -> np.ndarray:
    """The training stream; made, with its tokenizer, on the first call for `out`."""
    if not (out / "corpus.npy").exists():
        texts = [text for held, _, text in documents() if not held]
        tokenizer = train_tokenizer(texts)
        tokenizer.save(str(out / "target" / "tokenizer.json"))
        stream = token_stream(tokenizer, texts)
        np.save(out / "corpus.npy", stream)
        print(f"{len(texts)} documents, {sum(map(len, texts)):,} characters, {len(stream):,} tokens", flush=True)
    return np.load(out / "corpus.npy")


def initialise(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if not p.is_floating_point():  # tid2eid: two different experts for every token
            p.data = torch.rand(p.shape[0], CONFIG["n_routed_experts"]).argsort(1)[:, : p.shape[1]].contiguous()
        elif leaf == "base" and p.shape[0] > CONFIG["hc_mult"]:  # streams start out nearly separate
            hc = CONFIG["hc_mult"]
            p.data[:hc], p.data[2 * hc :] = -1.0, 3 * torch.eye(hc).flatten()
        elif leaf == "fn":
            nn.init.normal_(p, std=0.01)
        elif p.dim() > 1 and leaf != "ape":
            nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[-1] ** -0.5)


class Muon:
    """Momentum whose update is orthogonalised (Jordan et al., 2024), for 2-D tensors.

    The rule is torch.optim.Muon's; here all matrices of one shape are iterated together, because one by one the two
    hundred small ones of this model took 28% of a training step.
    """

    def __init__(self, matrices: list[Tensor], momentum: float = 0.95, weight_decay: float = 0.02):
        self.momentum, self.weight_decay = momentum, weight_decay
        shapes = sorted({m.shape for m in matrices})
        self.groups = [[m for m in matrices if m.shape == shape] for shape in shapes]
        self.velocity = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    def step(self, lr: float) -> None:
        for group, velocity in zip(self.groups, self.velocity):
            gradient = torch.stack([m.grad for m in group])
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(velocity, self.momentum)).float()
            rows, columns = update.shape[1:]
            for matrix, direction in zip(group, update):
                matrix.data.mul_(1 - lr * self.weight_decay).sub_(direction, alpha=lr * max(1, rows / columns) ** 0.5)


def orthogonalise(x: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices to x [N, rows, columns], by five Newton-Schulz steps in bfloat16."""
    if x.shape[1] > x.shape[2]:
        return orthogonalise(x.transpose(1, 2)).transpose(1, 2)
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Masters:
    """Float32 copies of a module's parameters and their optimisers: Muon for matrices inside the blocks, AdamW else."""

    def __init__(self, module: nn.Module, muon_lr: float, adam_lr: float):
        self.pairs, matrices, others = [], [], []
        for name, p in module.named_parameters():
            if not p.requires_grad:
                continue
            matrix = p.dim() > 1 and ".hc_" not in name and name.startswith(("layers.", "stages.", "main_proj."))
            matrix = matrix and not name.endswith(("ape", "gate.weight", "weights_proj.weight"))
            for part in range(p.shape[0] if p.dim() == 3 else 1):  # one matrix per expert
                index = part if p.dim() == 3 else slice(None)
                master = p.data[index].float().clone().requires_grad_()
                self.pairs.append((p, index, master))
                (matrices if matrix else others).append(master)
        self.muon, self.muon_lr = Muon(matrices), muon_lr
        self.adam, self.adam_lr = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0), adam_lr

    def step(self, lr_factor: float) -> None:
        for p, index, master in self.pairs:
            master.grad = p.grad[index].float()
        self.muon.step(self.muon_lr * lr_factor)
        self.adam.param_groups[0]["lr"] = self.adam_lr * lr_factor
        self.adam.step()
        with torch.no_grad():
            for p, index, master in self.pairs:
                p[index] = master.to(p.dtype)
                p.grad = None

    def state_dict(self) -> dict:
        return {
            "masters": [m.data for _, _, m in self.pairs],
            "velocity": self.muon.velocity,
            "adam": self.adam.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        with torch.no_grad():
            for (p, index, master), saved in zip(self.pairs, state["masters"]):
                master.copy_(saved)
                p[index] = saved.to(p.dtype)
        self.muon.velocity = state["velocity"]
        self.adam.load_state_dict(state["adam"])


def lr_factor(progress: float) -> float:
    """Short warm-up, plateau, linear decay over the second half. progress in [0, 1]."""
    return min(1.0, progress / 0.02 + 0.05, 2 * (1 - progress) + 0.01)


def balance(ffn: MoE, progress: float) -> None:
    """Load balancing without an auxiliary loss (DeepSeek-V3, section 2.1.2): busy experts are picked a little less."""
    ffn.gate.bias += 2e-3 * (1 - progress) * (ffn.load.float().mean() - ffn.load).sign()


def save_state(path: Path, model: nn.Module, masters: Masters, elapsed: float, step: int) -> None:
    """Write everything a resumed run needs; renamed into place, so an interruption leaves the state before."""
    state = {"model": model.state_dict(), "masters": masters.state_dict(), "elapsed": elapsed, "step": step}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def sample_sequences(stream: np.ndarray, batch: int, rng: np.random.Generator) -> Tensor:
    """Random crops [batch, SEQUENCE + 1], each opened by bos as every prompt is."""
    starts = rng.integers(0, len(stream) - SEQUENCE - 1, batch)
    tokens = torch.from_numpy(np.stack([stream[s : s + SEQUENCE + 1] for s in starts]).astype(np.int64))
    tokens[:, 0] = CONFIG["bos_token_id"]
    return tokens


def flat_batch(batch: int) -> tuple[Tensor, Tensor]:
    """seq_slot and position [batch * SEQUENCE] of a rectangle of sequences."""
    return torch.arange(batch).repeat_interleave(SEQUENCE), torch.arange(SEQUENCE).repeat(batch)


@torch.no_grad()
def bits_per_byte(target: Transformer, stream: np.ndarray, tokenizer: Tokenizer, windows: int) -> float:
    """Mean cost in bits per byte of text, over `windows` evenly spaced crops of the held-out stream."""
    starts = np.linspace(0, len(stream) - SEQUENCE - 1, windows).astype(int)
    nats = num_bytes = 0
    for chunk in np.array_split(starts, math.ceil(windows / 16)):
        tokens = torch.from_numpy(np.stack([stream[s : s + SEQUENCE + 1] for s in chunk]).astype(np.int64))
        tokens[:, 0] = CONFIG["bos_token_id"]
        target.allocate_cache(len(chunk), SEQUENCE, SEQUENCE)
        rows = torch.arange(len(chunk) * SEQUENCE)
        logits, _ = target(tokens[:, :-1].flatten(), *flat_batch(len(chunk)), rows, group=GROUP)
        nats += F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").item()
        num_bytes += sum(len(text.encode()) for text in tokenizer.decode_batch(tokens[:, 1:].tolist()))
    return nats / math.log(2) / num_bytes


def train_target(out: Path, minutes: float, batch: int) -> None:
    """Next-token training. The schedule follows the clock, so a slower machine trains on less text."""
    train = load_corpus(out)
    tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
    validation = token_stream(tokenizer, held_out_texts())
    (out / "target" / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    target = Transformer(Config.load(out / "target"))
    initialise(target)
    cast(target, torch.bfloat16)
    masters, elapsed, step = Masters(target, muon_lr=0.02, adam_lr=4e-3), 0.0, 0
    if (out / "target_state.pt").exists():
        state = torch.load(out / "target_state.pt")
        target.load_state_dict(state["model"])
        masters.load_state_dict(state["masters"])
        elapsed, step = state["elapsed"], state["step"]
    print(
        f"target: {sum(p.numel() for p in target.parameters()):,} parameters, from minute {elapsed / 60:.0f}",
        flush=True,
    )
    learned = [layer.ffn for layer in target.layers if not layer.ffn.gate.hash_routed]
    indexed = [layer.attn for layer in target.layers if layer.attn.ratio == 4]
    seq_slot, position = flat_batch(batch)
    target.train()
    for layer in target.layers:
        layer.compile()

    last, saved, marked, average = None, elapsed, elapsed - 1e-3, None
    while elapsed < minutes * 60:
        tokens = sample_sequences(train, batch, np.random.default_rng(step))
        target.allocate_cache(batch, SEQUENCE, SEQUENCE)
        logits, _ = target(tokens[:, :-1].flatten(), seq_slot, position, torch.arange(len(position)), group=GROUP)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        (loss + sum(attn.indexer_loss for attn in indexed)).backward()
        progress = elapsed / (minutes * 60)
        masters.step(lr_factor(progress))
        for ffn in learned:
            balance(ffn, progress)
        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        step += 1
        now = time.time()
        elapsed, last = elapsed + (now - last if last else 0), now  # the first step, which compiles, does not count
        if step % 20 == 0:
            load = torch.stack([ffn.load / ffn.load.sum() for ffn in learned]).max().item()
            rate = batch * SEQUENCE * 20 / (elapsed - marked)
            marked = elapsed
            print(
                f"{elapsed / 60:6.1f} min  step {step:5d}  loss {average:.3f}  {rate:.0f} tokens/s  max load {load:.2f}",
                flush=True,
            )
        if elapsed - saved > 300 or elapsed >= minutes * 60:
            saved = elapsed
            save_state(out / "target_state.pt", target, masters, elapsed, step)
            save_checkpoint(out / "target" / "model.safetensors", target)
            target.eval()
            with torch.compiler.set_stance("force_eager"):
                print(f"held out: {bits_per_byte(target, validation, tokenizer, 48):.4f} bits per byte", flush=True)
            target.train()


def generated_text(out: Path, batches: int = 12, width: int = 256) -> np.ndarray:
    """Sequences [batches * width, SEQUENCE + 1] that the target itself wrote after short openings from the corpus.

    The drafter will follow the target's own text, not the corpus; a quarter of it is greedy. Made once per `out`.
    """
    path = out / "generated.npy"
    if not path.exists():
        from engine import Engine, SamplingParams

        train, rng = load_corpus(out), np.random.default_rng(0)
        engine = Engine(str(out / "target"), 0, max_num_seqs=width, max_model_len=SEQUENCE + 2, profile_context_len=0)
        prompts, params = [], []
        for i in range(batches * width):
            start, length = rng.integers(len(train) - 64), rng.integers(1, 48)
            prompts.append([CONFIG["bos_token_id"], *train[start : start + length].tolist()])
            temperature = 0.0 if i % 4 == 0 else 1.0
            params.append(SamplingParams(temperature, max_tokens=SEQUENCE + 1 - len(prompts[-1]), ignore_eos=True))
        completions = engine.generate(prompts, params)
        sequences = [c.prompt_token_ids + c.token_ids for c in completions]
        np.save(path, np.array(sequences, dtype=np.uint16))
        print(f"the target wrote {engine.stats.output_tokens:,} tokens in {engine.stats.wall_s:.0f} s", flush=True)
    return np.load(path)


def block_losses(
    drafter: Drafter, taps: Tensor, logits: Tensor, tokens: Tensor, slot: Tensor, anchor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Teacher-forced blocks at anchor positions `anchor` [R] of sequences `slot` [R].

    taps [B * S, .] and logits [B, S, V] of the target, tokens [B, S + 1]. Returns, each [R, gamma]: cross-entropy to the
    text, L1 distance to the target's distribution, confidence logits, and acceptance probability 1 - L1 / 2.
    """
    gamma = drafter.config.dspark_block_size
    drafter.store(taps, *flat_batch(len(tokens)))
    previous = tokens[slot[:, None], anchor[:, None] + torch.arange(gamma)]
    hidden, base = drafter.run_block(previous[:, 0], slot, anchor, gamma)
    markov = drafter.markov_head.markov_w1(previous)
    log_q = (base + drafter.markov_head.markov_w2(markov)).float().log_softmax(-1)
    where = slot[:, None], anchor[:, None] + torch.arange(gamma)
    cross_entropy = -log_q.gather(2, tokens[where[0], where[1] + 1][..., None])[..., 0]
    distance = (log_q.exp() - logits[where].softmax(-1)).abs().sum(-1)
    confidence = drafter.confidence_head(hidden, markov)
    return cross_entropy, distance, confidence, 1 - distance.detach() / 2


def train_drafter(out: Path, minutes: float, batch: int, anchors: int) -> None:
    """DSpark training (arXiv 2607.05147): the target frozen, `anchors` blocks inside every sequence."""
    train, generated = load_corpus(out), generated_text(out)
    target, _ = load_checkpoint(out / "target", torch.bfloat16)
    config = target.config
    drafter = Drafter(config, CONFIG["num_nextn_predict_layers"], target)
    for part in (drafter.main_proj, drafter.stages, drafter.hc_head, drafter.markov_head, drafter.confidence_head):
        initialise(part)
    nn.init.normal_(drafter.markov_head.markov_w1.weight, std=0.5)
    nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    nn.init.zeros_(drafter.confidence_head.proj.weight)
    cast(drafter, torch.bfloat16)
    masters, elapsed, step = Masters(drafter, muon_lr=0.02, adam_lr=4e-3), 0.0, 0
    if (out / "drafter_state.pt").exists():
        state = torch.load(out / "drafter_state.pt")
        drafter.load_state_dict(state["model"])
        masters.load_state_dict(state["masters"])
        elapsed, step = state["elapsed"], state["step"]
    print(
        f"drafter: {sum(m.numel() for _, _, m in masters.pairs):,} parameters, from minute {elapsed / 60:.0f}",
        flush=True,
    )
    gamma, (seq_slot, position) = config.dspark_block_size, flat_batch(batch)
    weight = torch.exp(-torch.arange(gamma) / gamma)
    weight = weight / weight.sum()
    drafter.stages.train()
    for block in (*target.layers, *drafter.stages):
        block.compile()

    last, saved, average = None, elapsed, None
    while elapsed < minutes * 60:
        rng = np.random.default_rng(10**6 + step)
        own = torch.from_numpy(generated[rng.integers(0, len(generated), 3 * batch // 4)].astype(np.int64))
        tokens = torch.cat([sample_sequences(train, batch - len(own), rng), own])
        target.allocate_cache(batch, SEQUENCE, SEQUENCE)
        drafter.allocate_cache(batch, SEQUENCE, SEQUENCE)
        with torch.no_grad():
            logits, taps = target(
                tokens[:, :-1].flatten(), seq_slot, position, torch.arange(len(position)), group=GROUP
            )
        slot = torch.arange(batch).repeat_interleave(anchors)
        anchor = torch.from_numpy(rng.integers(0, SEQUENCE - gamma, batch * anchors))
        logits = logits.view(batch, SEQUENCE, -1)
        cross_entropy, distance, confidence, accepted = block_losses(drafter, taps, logits, tokens, slot, anchor)
        calibration = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        ((0.1 * cross_entropy + 0.9 * distance + 3 * calibration).mean(0) @ weight).backward()
        progress = elapsed / (minutes * 60)
        masters.step(lr_factor(progress))
        for stage in drafter.stages:
            balance(stage.ffn, progress)
        accepted = accepted.mean(0)
        average = accepted if average is None else 0.95 * average + 0.05 * accepted
        step += 1
        now = time.time()
        elapsed, last = elapsed + (now - last if last else 0), now  # the first step, which compiles, does not count
        if step % 20 == 0:
            rates = " ".join(f"{a:.3f}" for a in average.tolist())
            print(f"{elapsed / 60:6.1f} min  step {step:5d}  acceptance by position {rates}", flush=True)
        if elapsed - saved > 300 or elapsed >= minutes * 60:
            saved = elapsed
            save_state(out / "drafter_state.pt", drafter, masters, elapsed, step)
            for name in ("config.json", "tokenizer.json"):
                shutil.copy(out / "target" / name, CHECKPOINT / name)
            save_checkpoint(CHECKPOINT / "model.safetensors", target, drafter)


# ---- calibration and evaluation: on text that the engine itself generates from held-out prompts ----------------------


def held_out_prompts(count: int, seed: int = 0, length: int = 48, kind: str = "all") -> list[list[int]]:
    """`count` prompts of `length` tokens, bos included, each from a random line on of a held-out document."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    rng, span = np.random.default_rng(seed), 8 * length  # characters, more than enough
    texts = [text for text in held_out_texts(kind) if len(text) > 2 * span]
    prompts = []
    for _ in range(count):
        text = texts[rng.integers(len(texts))]
        start = text.find("\n", rng.integers(len(text) - span)) + 1
        ids = tokenizer.encode(text[start : start + span], add_special_tokens=False).ids
        prompts.append([CONFIG["bos_token_id"], *ids[: length - 1]])
    return prompts


def generated_blocks(engine, prompts: list[list[int]], temperature: float, max_tokens: int = 128):
    """Every fully verified block while generating from the prompts, N of them.

    Returns calibration features [N, gamma, F], confidence [N, gamma] and accepted drafts [N].
    """
    from engine import SamplingParams

    newest, waiting, blocks = [], {}, []

    def observe(calibration, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        newest[:] = calibration_features(*inputs[:2])

    def on_step(record: dict) -> None:
        for r, features in zip(record["requests"], newest):  # these are of the block that this step has drafted
            if r["admitted"] == engine.gamma:
                blocks.append((waiting[r["index"]], torch.tensor(r["confidence"]), torch.tensor(r["accepted"])))
            waiting[r["index"]] = features

    hook = engine.drafter.calibration.register_forward_hook(observe)
    engine.generate(prompts, SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True), on_step)
    hook.remove()
    return tuple(torch.stack(column) for column in zip(*blocks))


def full_verification_engine():
    from engine import Engine

    return Engine(str(CHECKPOINT), adaptive_verification=False, max_num_seqs=32, dtype="float32")


def calibrate() -> None:
    """Fit the calibration for sampling at temperature 1 and 0, and store it beside the checkpoint."""
    engine, fitted = full_verification_engine(), {}
    for temperature in (1.0, 0.0):
        features, _, accepted = generated_blocks(engine, held_out_prompts(1152, seed=1), temperature)
        survived = accepted[:, None] > torch.arange(engine.gamma)
        fitted[str(temperature)] = [[round(w, 5) for w in row] for row in fit_calibration(features, survived)]
        print(f"temperature {temperature}: fitted on {len(accepted)} blocks")
    (CHECKPOINT / "calibration.json").write_text(json.dumps({"confidence_weights": fitted}) + "\n")


def area_under_curve(score: Tensor, label: Tensor) -> float:
    """Probability that a random positive scores above a random negative, ties half. score [N], label [N] bool."""
    positive, negative = score[label], score[~label].sort().values
    below = torch.searchsorted(negative, positive) + torch.searchsorted(negative, positive, right=True)
    return (below.float().mean() / 2 / len(negative)).item()


def evaluate() -> None:
    """Print what the README states: bits per byte, accepted length, confidence AUC and calibration error."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    validation = token_stream(tokenizer, held_out_texts())
    engine = full_verification_engine()
    with torch.inference_mode():
        bits = bits_per_byte(engine.target, validation, tokenizer, 256)
    print(f"held-out text: {bits:.3f} bits per byte")
    engine = full_verification_engine()
    for temperature in (1.0, 0.0):
        _, confidence, accepted = generated_blocks(engine, held_out_prompts(576, seed=4), temperature)
        print(f"temperature {temperature}, {len(accepted)} blocks generated from held-out prompts, all drafts verified")
        print(f"  mean accepted length    {engine.stats.report()['mean_accepted_length']:.2f}")
        survival, slots = confidence.cumprod(1), range(engine.gamma)
        reached = [accepted >= k for k in slots]
        rows = {
            "acceptance by position": [(accepted[reached[k]] > k).float().mean().item() for k in slots],
            "confidence AUC": [area_under_curve(confidence[reached[k], k], accepted[reached[k]] > k) for k in slots],
            "ECE of survival": [expected_calibration_error(survival[:, k], accepted > k) for k in slots],
        }
        for name, values in rows.items():
            print(f"  {name:24}" + " ".join(f"{v:.3f}" for v in values))
        every = torch.cat([accepted > k for k in slots])
        print(
            f"  ECE of survival, all positions together {expected_calibration_error(survival.T.flatten(), every):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for stage in ("target", "drafter", "calibrate", "evaluate"):
        parser.add_argument(f"--{stage}", action="store_true")
    parser.add_argument("--target-minutes", type=float, default=62)
    parser.add_argument("--drafter-minutes", type=float, default=100)
    parser.add_argument("--out", type=Path, default=Path("build"), help="working directory (default: build)")
    args = parser.parse_args()
    if not (args.target or args.drafter or args.calibrate or args.evaluate):
        parser.error("name at least one of --target, --drafter, --calibrate, --evaluate")
    (args.out / "target").mkdir(exist_ok=True, parents=True)
    CHECKPOINT.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    if args.target:
        train_target(args.out, args.target_minutes, batch=8)
    if args.drafter:
        train_drafter(args.out, args.drafter_minutes, batch=8, anchors=192)
    if args.calibrate:
        calibrate()
    if args.evaluate:
        evaluate()


if __name__ == "__main__":
    main()
