"""The DeepSeek-V4 target model: config, modules, cache and one flat forward.

Every step is three tensors of length T: `token`, `seq_slot`, `position`. Prompt chunks, decoding and the verification of
drafts are the same call, because what a token may see follows from (seq_slot, position) alone. The caches are
addressed by position, so a rejected draft needs no rollback: the right token for that position overwrites it before any
query can see it.

Sources: the DeepSeek-V4 release (config.json, key names) and its implementation in Hugging Face transformers, which the
tests compare this file with. Parameter names are the release's, so loading is by name (weights.py).
"""

import json
import math
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    """The fields of a release config.json that change the computation; names are the release's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    sliding_window: int
    compress_ratios: list[int]  # 0, 4 or 128 per layer; the tail beyond num_hidden_layers belongs to the draft stages
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: dict | None = None  # {type: yarn, factor, original_max_position_embeddings, beta_fast, beta_slow}
    max_position_embeddings: int = 1048576
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1
    dspark_block_size: int = 0  # 0: a checkpoint without a drafter
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: list[int] = field(default_factory=list)
    dspark_markov_rank: int = 0
    rank: int = 0  # not the release's: which of world_size processes this is; each has its share of the routed experts
    world_size: int = 1

    @classmethod
    def load(cls, directory: str | Path) -> "Config":
        """Read DIRECTORY/config.json. Raises ValueError naming the file and the key that is missing or wrong."""
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror.lower()}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        model_type = raw.get("model_type") if isinstance(raw, dict) else None
        if model_type != "deepseek_v4":
            raise ValueError(f"{path}: model_type is {model_type!r}, supported: 'deepseek_v4'")
        known = {f.name for f in fields(cls)} - {"rank", "world_size"}
        try:
            config = cls(**{key: value for key, value in raw.items() if key in known})
        except TypeError as error:
            raise ValueError(f"{path}: {str(error).split('__init__() ')[-1]}") from None
        if problem := config.problem():
            raise ValueError(f"{path}: {problem}")
        return config

    def problem(self) -> str | None:
        """What cannot be about these values, if anything. The bounds keep every size a number that fits its type."""
        most = {"max_position_embeddings": 2**30, "num_hidden_layers": 1000, "hc_mult": 64, "hc_sinkhorn_iters": 1000}
        for f in fields(self):
            value, required = getattr(self, f.name), f.default is MISSING and f.default_factory is MISSING
            if f.type == list[int]:
                fine, wanted = isinstance(value, list) and all(type(x) is int for x in value), "a list of integers"
            elif f.type is int:
                least = 1 if required and f.name != "num_hash_layers" else 0
                bound = most.get(f.name, 2**20)
                fine, wanted = type(value) is int and least <= value <= bound, f"an integer, {least} to {bound}"
            elif f.type is float:
                fine, wanted = type(value) in (int, float) and 0 < value < math.inf, "a positive number"
            else:
                keys = ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow"]
                numbers = [value.get(key) for key in keys] if isinstance(value, dict) else [None]
                fine = value is None or all(type(x) in (int, float) and 0 < x < math.inf for x in numbers)
                wanted = f"an object with positive numbers {', '.join(keys)}"
            if not fine:
                return f"{f.name} is {value!r}, allowed: {wanted}"
        layers, ratios, taps = self.num_hidden_layers, self.compress_ratios, self.dspark_target_layer_ids
        for wrong, message in (
            (len(ratios) < layers or set(ratios) - {0, 4, 128}, "compress_ratios needs one of 0, 4, 128 for each layer"),
            (any(tap >= layers for tap in taps), f"dspark_target_layer_ids is {taps}, but there are {layers} layers"),
            (self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim),
             f"qk_rope_head_dim is {self.qk_rope_head_dim}, allowed: even, no more than head_dim and index_head_dim"),
            (self.num_attention_heads * self.head_dim % self.o_groups, "o_groups must divide the width of all heads"),
            (self.num_experts_per_tok > self.n_routed_experts, "num_experts_per_tok is more than n_routed_experts"),
            (self.dspark_noise_token_id >= self.vocab_size, "dspark_noise_token_id is not in the vocabulary"),
        ):  # fmt: skip
            if wrong:
                return message
        return None


class Rope(NamedTuple):
    """Factors for `rotate` at T positions, [T, width]; the channels in front, which are not rotated, have cos 1, sin 0."""

    cos: Tensor
    sin: Tensor  # with the sign that each channel's partner takes: -, +, -, +, ...


class Closing(NamedTuple):
    """What every compressor of one ratio needs to know about a step's T tokens and the C that close a window.

    Where shapes must be static all T tokens count as closing, and those that do not write to the scratch entry.
    """

    ring_row: Tensor  # [T] where each token's raw state goes
    phase: Tensor  # [T] position % ratio
    slot: Tensor  # [C, 1]
    source: Tensor  # [C, overlap * ratio] state rows that an entry is made of
    part: Tensor  # [overlap * ratio] channel group to take from each: 0 for the window before, the last for this one
    missing: Tensor  # [C, overlap * ratio, 1] before the first position
    entry: Tensor  # [C] the entry to write
    rope: Rope  # of the entries, [C, width]


class Fetch(NamedTuple):
    """The K cache rows that each of N groups reads, and which of them each of its queries may see."""

    row: Tensor  # [N, K]
    visible: Tensor  # [N, group, K]


class Step(NamedTuple):
    """What all layers need to know about the T tokens of one forward. N = T / group groups share their key fetch."""

    seq_slot: Tensor  # [T]
    position: Tensor  # [T]
    rope: dict[bool, Rope]  # compressed layer? -> of each position
    group_slot: Tensor  # [N, 1]
    ring_row: Tensor  # [T] row of each token in the window ring
    window: Fetch  # from the window ring
    fetch: dict[int, Fetch]  # ratio -> the window and, where all of them are read, the compressed entries
    closing: dict[int, Closing]  # by ratio


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, cast back once."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def rope_factors(position: Tensor, frequencies: Tensor, width: int) -> Rope:
    """position [T], frequencies [rope_dim / 2] -> factors for vectors of up to `width` channels."""
    angle = position[:, None] * frequencies
    cos, sin, front = angle.cos(), angle.sin(), (width - 2 * len(frequencies), 0)
    cos, sin = (torch.stack(pair, dim=-1).flatten(1) for pair in ((cos, cos), (-sin, sin)))
    return Rope(F.pad(cos, front, value=1.0), F.pad(sin, front))


def rotate(x: Tensor, rope: Rope, back: bool = False) -> Tensor:
    """RoPE on interleaved pairs of the last channels, those that have a sine. x [T, ..., d]."""
    shape = (len(x), *(1,) * (x.dim() - 2), x.shape[-1])
    cos, sin = (factor[:, -x.shape[-1] :].view(shape) for factor in rope)
    y = x.float()
    partner = y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(y * cos, partner, sin, value=-1 if back else 1).to(x.dtype)


def rope_frequencies(config: Config, compressed: bool) -> Tensor:
    """Inverse frequencies [rope_dim / 2]; compressed layers have their own base and YaRN interpolation, no mscale."""
    dim, base = config.qk_rope_head_dim, config.compress_rope_theta if compressed else config.rope_theta
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if not compressed or config.rope_scaling is None:
        return frequencies
    yarn = config.rope_scaling

    def channel(rotations):  # the (fractional) pair that turns this many times within the original context
        return (
            dim * math.log(yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(base))
        )

    low = max(math.floor(channel(yarn["beta_fast"])), 0)
    high = min(math.ceil(channel(yarn["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn["factor"] * ramp


def attend(q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with one shared head of keys, which are also the values, and a learnt sink in the denominator.

    q [N, G, H, d], keys [N, K, d], visible [N, G, K] bool, sink [H] -> output [N, G, H, d], weights [N, G, H, K].
    """
    N, G, H, d = q.shape
    scores = (q.reshape(N, G * H, d) @ keys.transpose(1, 2)).view(N, G, H, -1).float() * d**-0.5
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    scores = torch.cat([scores, sink.view(1, 1, H, 1).expand(N, G, H, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :-1].to(keys.dtype)
    return (weights.reshape(N, G * H, -1) @ keys).view(N, G, H, d), weights


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim, dtype=torch.float32)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight)


def linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def num_entries(max_len: int, ratio: int) -> int:
    """Compressed entries of a sequence of max_len positions."""
    return max_len // ratio if ratio else 0


def window_overlap(ratio: int) -> int:
    """How many windows an entry pools: with ratio 4 also the one before."""
    return 2 if ratio == 4 else 1


class Compressor(nn.Module):
    """Pools `ratio` tokens into one cache entry, a gated sum per channel; ratio 4 also looks at the window before.

    Entry w covers positions w * ratio .. w * ratio + ratio - 1 and is written by the token that closes it. The raw
    (kv, gate) of every position live in a ring, so an entry can be recomputed after a rejection.
    """

    def __init__(self, config: Config, ratio: int, width: int):
        super().__init__()
        self.ratio, self.width, self.overlap = ratio, width, window_overlap(ratio)
        self.wkv = linear(config.hidden_size, self.overlap * width)
        self.wgate = linear(config.hidden_size, self.overlap * width)
        self.ape = nn.Parameter(torch.zeros(ratio, self.overlap * width, dtype=torch.float32))
        self.norm = RMSNorm(width, config.rms_norm_eps)

    def allocate(self, num_slots: int, max_chunk: int, device, dtype):
        ring = self.overlap * self.ratio + max_chunk
        for name, shape, kind in (
            ("state_kv", (num_slots, ring, self.overlap, self.width), dtype),
            ("state_gate", (num_slots, ring, self.overlap, self.width), torch.float32),
        ):
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=kind), persistent=False)

    def forward(self, x: Tensor, step: Step, cache: Tensor, first_row: int) -> None:
        """Store the T tokens' projections, and in cache[slot, first_row + entry] all entries that one of them closes."""
        closing, parts = step.closing[self.ratio], (-1, self.overlap, self.width)
        self.state_kv[step.seq_slot, closing.ring_row] = self.wkv(x).view(parts)
        self.state_gate[step.seq_slot, closing.ring_row] = (self.wgate(x) + self.ape[closing.phase]).view(parts)
        if not len(closing.entry):
            return
        kv = self.state_kv[closing.slot, closing.source, closing.part]  # [C, overlap * ratio, width]
        gate = self.state_gate[closing.slot, closing.source, closing.part].masked_fill(closing.missing, -torch.inf)
        entry = self.norm((gate.softmax(1).to(kv.dtype) * kv).sum(1))
        cache[closing.slot[:, 0], first_row + closing.entry] = rotate(entry, closing.rope)


class Indexer(nn.Module):
    """Scores the ratio-4 entries for every query with a few small heads, so that attention reads only the best."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = linear(config.q_lora_rank, self.heads * self.dim)
        self.weights_proj = linear(config.hidden_size, self.heads)
        self.compressor = Compressor(config, 4, self.dim)

    def allocate(self, num_slots: int, max_len: int, max_chunk: int, device, dtype):
        keys = torch.zeros(num_slots, num_entries(max_len, 4) + 1, self.dim, device=device, dtype=dtype)
        self.register_buffer("keys", keys, persistent=False)  # the last one is scratch
        self.compressor.allocate(num_slots, max_chunk, device, dtype)

    def forward(self, x: Tensor, q_latent: Tensor, step: Step) -> Tensor:
        """x [T, hidden], q_latent [T, q_lora_rank] -> scores [N, group, E] in float32; those of no entry yet are -inf."""
        self.compressor(x, step, self.keys, 0)
        N, G = step.window.visible.shape[:2]
        q = rotate(self.wq_b(q_latent).view(-1, self.heads, self.dim), step.rope[True])
        keys = self.keys[step.group_slot[:, 0], :-1]  # [N, E, dim]
        scores = (q.view(N, G * self.heads, self.dim) @ keys.transpose(1, 2)).float().relu() * self.dim**-0.5
        weight = self.weights_proj(x).float() * self.heads**-0.5
        scores = (scores.view(N, G, self.heads, -1) * weight.view(N, G, self.heads, 1)).sum(2)
        closed = (step.position + 1).view(N, G, 1) // self.compressor.ratio
        return scores.masked_fill(torch.arange(keys.shape[1], device=keys.device) >= closed, -torch.inf)


class Attention(nn.Module):
    """Multi-query attention over a window of recent positions and, with a ratio, compressed entries of all the past.

    A slot of kv_cache holds the window ring, then the entries, then a scratch entry.
    """

    def __init__(self, config: Config, ratio: int):
        super().__init__()
        self.config, self.ratio = config, ratio
        H, d, groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = linear(config.q_lora_rank, H * d)
        self.wkv = linear(config.hidden_size, d)
        self.kv_norm = RMSNorm(d, config.rms_norm_eps)
        self.wo_a = linear(H * d // groups, groups * config.o_lora_rank)
        self.wo_b = linear(groups * config.o_lora_rank, config.hidden_size)
        self.attn_sink = nn.Parameter(torch.zeros(H, dtype=torch.float32))
        if ratio:
            self.compressor = Compressor(config, ratio, d)
        if ratio == 4:
            self.indexer = Indexer(config)

    def allocate(self, num_slots: int, max_len: int, max_chunk: int, device, dtype):
        self.ring = self.config.sliding_window + max_chunk
        self.choosing = chooses(self.config, max_len, self.ratio)
        rows = self.ring + num_entries(max_len, self.ratio) + 1
        kv_cache = torch.zeros(num_slots, rows, self.config.head_dim, device=device, dtype=dtype)
        self.register_buffer("kv_cache", kv_cache, persistent=False)
        if self.ratio:
            self.compressor.allocate(num_slots, max_chunk, device, dtype)
        if self.choosing:
            self.indexer.allocate(num_slots, max_len, max_chunk, device, dtype)

    def queries(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> q [T, H, d] after norm and RoPE, and the latent [T, q_lora_rank] that the indexer shares."""
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).view(-1, self.config.num_attention_heads, self.config.head_dim)
        return rotate(rms_norm(q, self.config.rms_norm_eps), rope), q_latent

    def keys(self, x: Tensor, rope: Rope) -> Tensor:
        """x [T, hidden] -> kv [T, d], key and value at once."""
        return rotate(self.kv_norm(self.wkv(x)), rope)

    def output(self, out: Tensor, rope: Rope) -> Tensor:
        """out [T, H, d] -> [T, hidden]: rotate back at the query's position, then project, heads in groups."""
        groups = self.config.o_groups
        out = rotate(out, rope, back=True).reshape(out.shape[0], groups, -1).transpose(0, 1)  # [groups, T, .]
        latent = out @ self.wo_a.weight.view(groups, self.config.o_lora_rank, -1).transpose(1, 2)
        return self.wo_b(latent.transpose(0, 1).flatten(1))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Writes come before reads, so tokens of one step see each other."""
        rope = step.rope[self.ratio > 0]
        q, q_latent = self.queries(x, rope)
        self.kv_cache[step.seq_slot, step.ring_row] = self.keys(x, rope)
        if self.ratio:
            self.compressor(x, step, self.kv_cache, self.ring)
        if self.choosing:
            scores = self.indexer(x.detach(), q_latent.detach(), step)
            fetch = choose(scores, self.config.index_topk, step.window, self.ring)
        else:
            fetch = step.fetch[self.ratio]
        keys = self.kv_cache[step.group_slot, fetch.row]  # [N, K, d]
        grouped_q = q.view(*fetch.visible.shape[:2], *q.shape[1:])
        out, weights = attend(grouped_q, keys, fetch.visible, self.attn_sink)
        if self.training and self.choosing:
            E = scores.shape[2]
            self.indexer_loss = indexer_loss(scores, weights[..., -E:], fetch.visible[..., -E:])
        return self.output(out.view(q.shape), rope)


def chooses(config: Config, max_len: int, ratio: int) -> bool:
    """Whether a layer needs its indexer: only if there can be more entries than it may read."""
    return ratio == 4 and config.index_topk < num_entries(max_len, ratio)


def choose(scores: Tensor, top_k: int, window: Fetch, ring: int) -> Fetch:
    """The window and the top_k best entries of every query. scores [N, group, E], -inf for entries not yet written.

    A query alone in its group fetches just its own. Queries that share a group fetch all entries and mask.
    """
    N, G, E = scores.shape
    best = scores.topk(top_k, sorted=False)
    if G == 1:
        entry, visible = best.indices[:, 0], best.values > -torch.inf
    else:
        entry = torch.arange(E, device=scores.device).expand(N, E)
        visible = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best.indices, best.values > -torch.inf)
    return Fetch(torch.cat([window.row, ring + entry], dim=1), torch.cat([window.visible, visible], dim=2))


def indexer_loss(scores: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """KL from the attention's own distribution over the visible entries, heads averaged, to the indexer's (training)."""
    target = weights.detach().float().mean(2) * visible
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-6)
    log_index = scores.masked_fill(~visible, -1e4).log_softmax(-1)
    return (target * (target.clamp(min=1e-9).log() - log_index)).sum(-1).mean()


class Gate(nn.Module):
    """Routes tokens to experts: by learnt score plus balancing bias, or in the first layers by a table over token ids."""

    def __init__(self, config: Config, hash_routed: bool):
        super().__init__()
        self.config, self.hash_routed = config, hash_routed
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        if hash_routed:
            table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.zeros(config.n_routed_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> expert ids [T, k], weights [T, k]."""
        scores = F.softplus(F.linear(x, self.weight).float()).sqrt()
        if self.hash_routed:
            expert = self.tid2eid[token]
        else:
            expert = (scores + self.bias).topk(self.config.num_experts_per_tok, sorted=False).indices
        weight = scores.gather(1, expert)
        return expert, weight / weight.sum(-1, keepdim=True) * self.config.routed_scaling_factor


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Experts(nn.Module):
    """The routed experts of a layer, or this process's share; w1 (gate) and w3 (up) of the release lie in one tensor."""

    def __init__(self, config: Config):
        super().__init__()
        E, D, width = config.n_routed_experts // config.world_size, config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.first, self.split = config.rank * E, config.world_size > 1
        self.w13 = nn.Parameter(torch.empty(E, 2 * width, D))
        self.w2 = nn.Parameter(torch.empty(E, D, width))

    def forward(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """x [T, hidden], expert and weight [T, k] -> [T, hidden]."""
        E = len(self.w13)
        if self.split:  # the experts of other processes become one more, which comes last and does nothing
            expert = torch.where((expert >= self.first) & (expert < self.first + E), expert - self.first, E)
        out = self.compute(x, expert, weight)
        if self.split:
            dist.all_reduce(out)
        return out

    def sort(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """The order [T * k] that sorts (token, choice) pairs by expert, and where each expert's end [E]."""
        E = len(self.w13)
        ends = F.one_hot(expert, E + self.split).sum((0, 1))[:E].cumsum(0).int()
        return expert.flatten().argsort(stable=True), ends

    def compute(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """Tokens are sorted by expert for grouped products."""
        if self.training or (torch.compiler.is_compiling() and x.dtype == torch.float32):
            return self.compute_dense(x, expert, weight)  # torch 2.13 compiles grouped products in bfloat16 only
        k = expert.shape[1]
        order, ends = self.sort(expert)
        gate, up = F.grouped_mm(x[order // k], self.w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        hidden = swiglu(gate, up, self.limit) * weight.flatten()[order, None].to(x.dtype)
        out = F.grouped_mm(hidden, self.w2.transpose(1, 2), offs=ends)
        if self.split:  # rows behind the last end have not been written
            out = torch.where(torch.arange(len(out), device=out.device)[:, None] < ends[-1], out, 0)
        return torch.empty_like(out).index_copy(0, order, out).view(-1, k, out.shape[1]).sum(1)

    def compute_dense(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """The same from two plain products over all experts. More arithmetic, but with a few experts training is faster:
        group sizes that change every step make oneDNN compile new bfloat16 kernels all the time."""
        E = len(self.w13)
        share = torch.zeros(len(x), E + self.split, dtype=x.dtype, device=x.device)
        share = share.scatter(1, expert, weight.to(x.dtype))[:, :E]
        gate, up = F.linear(x, self.w13.flatten(0, 1)).view(len(x), E, -1).chunk(2, dim=-1)
        hidden = swiglu(gate, up, self.limit) * share[..., None]
        return F.linear(hidden.flatten(1), self.w2.transpose(0, 1).flatten(1))


class SharedExpert(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width = config.moe_intermediate_size * config.n_shared_experts
        self.limit = config.swiglu_limit
        self.w1 = linear(config.hidden_size, width)
        self.w2 = linear(width, config.hidden_size)
        self.w3 = linear(config.hidden_size, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit))


class MoE(nn.Module):
    def __init__(self, config: Config, hash_routed: bool):
        super().__init__()
        self.gate = Gate(config, hash_routed)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        expert, weight = self.gate(x, token)
        if self.training:
            self.load = F.one_hot(expert, self.gate.config.n_routed_experts).sum((0, 1))  # tokens per expert
        return self.experts(x, expert, weight) + self.shared_experts(x)


def sinkhorn(mix: Tensor, iters: int, eps: float) -> Tensor:
    """Make [T, hc, hc] matrices nearly doubly stochastic: softmax rows, then alternate column and row normalisation."""
    mix = mix.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


class HyperMix(nn.Module):
    """One normed linear map from all residual streams to the numbers that mix them (mHC)."""

    def __init__(self, config: Config, num_outputs: int, num_scales: int):
        super().__init__()
        self.config = config
        self.fn = nn.Parameter(torch.empty(num_outputs, config.hc_mult * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(num_outputs, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(num_scales, dtype=torch.float32))

    def mix(self, streams: Tensor) -> Tensor:
        """streams [T, hc, hidden] -> [T, num_outputs] float32; the norm is one factor, so it is applied after."""
        flat = streams.flatten(1).float()
        return F.linear(flat, self.fn) * (flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()


class HyperConnection(HyperMix):
    """Manifold-constrained hyper-connection around one sub-layer: hc_mult streams in, one vector through, streams out."""

    def __init__(self, config: Config):
        hc = config.hc_mult
        super().__init__(config, 2 * hc + hc * hc, 3)
        which = [0] * hc + [1] * hc + [2] * hc * hc  # of the three scales each output takes
        scale_of = torch.tensor(which, device="cpu")
        self.register_buffer("scale_of", scale_of, persistent=False)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, hc, hidden] -> sub-layer input [T, hidden], post [T, hc], comb [T, hc, hc] (float32)."""
        hc, eps = self.config.hc_mult, self.config.hc_eps
        gates, comb = torch.addcmul(self.base, self.mix(streams), self.scale[self.scale_of]).split([2 * hc, hc * hc], 1)
        pre, post = gates.sigmoid().chunk(2, dim=1)
        comb = sinkhorn(comb.view(-1, hc, hc), self.config.hc_sinkhorn_iters, eps)
        return collapse(streams, pre + eps), 2 * post, comb


class HyperHead(HyperMix):
    """Collapses the streams for the last time."""

    def __init__(self, config: Config):
        super().__init__(config, config.hc_mult, 1)

    def forward(self, streams: Tensor) -> Tensor:
        return collapse(streams, (self.mix(streams) * self.scale + self.base).sigmoid() + self.config.hc_eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * streams).sum(1).to(streams.dtype)


def expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams = post x out + comb^T @ streams (transposed!), [T, hc, hidden]."""
    mixed = comb.to(streams.dtype).transpose(1, 2) @ streams
    return post.to(out.dtype)[..., None] * out[:, None] + mixed


class Block(nn.Module):
    """One layer. `attn` takes (x, context); the target's context is the Step, a draft stage's is its block's."""

    def __init__(self, config: Config, attn: nn.Module, hash_routed: bool):
        super().__init__()
        self.attn = attn
        self.ffn = MoE(config, hash_routed)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config)
        self.hc_ffn = HyperConnection(config)

    def forward(self, streams: Tensor, token: Tensor, context) -> Tensor:
        """streams [T, hc, hidden] -> the same shape."""
        x, post, comb = self.hc_attn(streams)
        streams = expand(self.attn(self.attn_norm(x), context), streams, post, comb)
        x, post, comb = self.hc_ffn(streams)
        return expand(self.ffn(self.ffn_norm(x), token), streams, post, comb)


class Transformer(nn.Module):
    """The target. Call `allocate_cache` before the first forward."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, Attention(config, config.compress_ratios[i]), hash_routed=i < config.num_hash_layers)
            for i in range(config.num_hidden_layers)
        )
        self.hc_head = HyperHead(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = linear(config.hidden_size, config.vocab_size)
        self.rope_width = max(config.head_dim, config.index_head_dim)  # rotate takes the last channels it needs
        self.compiled = False
        for name, compressed in (("frequencies", False), ("frequencies_compressed", True)):
            self.register_buffer(name, rope_frequencies(config, compressed), persistent=False)

    def allocate_cache(self, num_slots: int, max_len: int, max_chunk: int):
        """Zeroed caches for `num_slots` sequences of up to `max_len` positions, plus a scratch slot for padding.

        max_chunk: the most tokens one sequence may have in one step; it sizes the rings, see Attention and Compressor.
        Elements of a slot, with E = max_len // ratio and overlap 2 for ratio 4, else 1:

            every layer            (sliding_window + max_chunk + E + 1) * head_dim, E = 0 for ratio 0
            compressed layers      (overlap * ratio + max_chunk) * overlap * head_dim, twice: kv, and gate in float32
            if ratio 4 and E > index_topk: (E + 1) * index_head_dim
                                   (8 + max_chunk) * 2 * index_head_dim, twice: kv, and gate in float32
        """
        self.max_len, self.max_chunk = max_len, max_chunk
        for layer in self.layers:
            layer.attn.allocate(num_slots + 1, max_len, max_chunk, self.embed.weight.device, self.embed.weight.dtype)

    def compile_layers(self) -> None:
        """Compile every layer for any number of tokens from 2 up, on the first forward; layers of a kind share a graph.

        Layer by layer, because the whole model as one graph takes minutes to compile.
        """
        self.compiled = True
        for layer in self.layers:
            layer.compile(dynamic=True, fullgraph=True)

    def prepare(self, seq_slot: Tensor, position: Tensor, group: int) -> Step:
        """Everything that follows from (seq_slot, position) [T] alone, computed once for all layers."""
        size, ring = self.config.sliding_window, self.config.sliding_window + self.max_chunk
        window_position = position[::group, None] + torch.arange(1 - size, group, device=position.device)  # [N, K]
        query, key = position.view(-1, group, 1), window_position[:, None]
        window = Fetch(window_position % ring, (key <= query) & (key > query - size) & (key >= 0))
        fetch, closing = {0: window}, {}
        for ratio in set(self.config.compress_ratios) - {0}:
            closing[ratio] = self.closing(seq_slot, position, ratio)
            if not chooses(self.config, self.max_len, ratio):
                entry = torch.arange(num_entries(self.max_len, ratio), device=position.device)
                row = torch.cat([window.row, (ring + entry).expand(len(window.row), -1)], dim=1)
                fetch[ratio] = Fetch(row, torch.cat([window.visible, entry < (query + 1) // ratio], dim=2))
        return Step(
            seq_slot,
            position,
            rope={
                False: rope_factors(position, self.frequencies, self.rope_width),
                True: rope_factors(position, self.frequencies_compressed, self.rope_width),
            },
            group_slot=seq_slot[::group, None],
            ring_row=position % ring,
            window=window,
            fetch=fetch,
            closing=closing,
        )

    def closing(self, seq_slot: Tensor, position: Tensor, ratio: int) -> Closing:
        """Where the compressors of `ratio` write the T tokens (seq_slot, position) [T], and what each closed entry reads."""
        overlap, phase = window_overlap(ratio), position % ratio
        ring = overlap * ratio + self.max_chunk  # as Compressor.allocate sizes it
        ring_row = position % ring
        if not position.is_cuda:
            last = (phase == ratio - 1).nonzero()[:, 0]
            if self.compiled:  # graphs take any size from 2 up; written twice, the first token leaves the same
                last = F.pad(last, (0, 2))
            seq_slot, position = seq_slot[last], position[last]
        back = torch.arange(overlap * ratio - 1, -1, -1, device=position.device)
        source = position[:, None] - back
        window = position // ratio
        entry = torch.where(position % ratio == ratio - 1, window, num_entries(self.max_len, ratio))
        rope = rope_factors(window * ratio, self.frequencies_compressed, self.rope_width)
        part = overlap - 1 - back // ratio
        return Closing(ring_row, phase, seq_slot[:, None], source % ring, part, (source < 0)[..., None], entry, rope)

    def forward(
        self, token: Tensor, seq_slot: Tensor, position: Tensor, rows: Tensor, group: int = 1
    ) -> tuple[Tensor, Tensor]:
        """One step over T tokens of any sequences, in any order but rising positions within a sequence.

        token, seq_slot, position [T] int64; rows [M]: the tokens whose logits are wanted. With group > 1 every `group`
        tokens in a row must be neighbours in one sequence; they share their key fetch (training, same result).
        Returns logits [M, vocab] float32 and taps [T, n_taps * hidden] for the drafter.
        """
        step = self.prepare(seq_slot, position, group)
        streams = self.embed(token)[:, None].expand(-1, self.config.hc_mult, -1)
        taps = {}
        for i, layer in enumerate(self.layers):
            streams = layer(streams, token, step)
            if i in self.config.dspark_target_layer_ids:
                taps[i] = streams.mean(1)
        logits = self.head(self.norm(self.hc_head(streams[rows]))).float()
        taps = [taps[i] for i in self.config.dspark_target_layer_ids] or [streams[:, 0, :0]]
        return logits, torch.cat(taps, dim=-1)
