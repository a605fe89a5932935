"""The DSpark drafter: a few V4 blocks that draft a block in one pass, a Markov head and a confidence head.

Source: DSpark (arXiv 2607.05147) and the release checkpoint's `mtp.N` keys. The drafter never runs the prompt: at every
verified position it stores keys computed from the target's hidden states (taps), and a block attends to those.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import (
    Attention,
    Block,
    Config,
    HyperHead,
    RMSNorm,
    Rope,
    Transformer,
    attend,
    linear,
    rope_factors,
    rope_frequencies,
)
from sampling import Warp, distribution, race, sample


class BlockContext(NamedTuple):
    """What all stages need to know about R blocks of G inputs each."""

    seq_slot: Tensor  # [R, 1]
    context_position: Tensor  # [R, W] the last sliding_window positions before each block
    rope: Rope  # of the block's own positions, [R * G]


class BlockAttention(Attention):
    """All queries of a block see the same keys: the context before the block, and the whole block in both directions."""

    def store(self, main_x: Tensor, seq_slot: Tensor, position: Tensor, rope: Rope) -> None:
        self.kv_cache[seq_slot, position % self.ring] = self.keys(main_x, rope)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """x [R * G, hidden] -> [R * G, hidden]."""
        R, W = context.context_position.shape
        q, _ = self.queries(x, context.rope)
        block_kv = self.keys(x, context.rope).view(R, -1, self.config.head_dim)
        context_kv = self.kv_cache[context.seq_slot, context.context_position % self.ring]
        G = block_kv.shape[1]
        visible = F.pad(context.context_position >= 0, (0, G), value=True)[:, None].expand(R, G, W + G)
        out, _ = attend(q.view(R, G, *q.shape[1:]), torch.cat([context_kv, block_kv], 1), visible, self.attn_sink)
        return self.output(out.view(q.shape), context.rope)


class MarkovHead(nn.Module):
    """Adds what the previous token says about the next: low-rank bigram logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.dspark_markov_rank)
        self.markov_w2 = linear(config.dspark_markov_rank, config.vocab_size)

    def forward(self, previous: Tensor) -> Tensor:
        """previous [R] -> logits [R, V] to add to the block's own."""
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """Predicts, before draft k is drawn, whether it will be accepted given that the drafts before it were."""

    def __init__(self, config: Config):
        super().__init__()
        self.proj = linear(config.hidden_size + config.dspark_markov_rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """hidden [..., hidden], markov [..., rank] -> logit [...] in float32."""
        return F.linear(torch.cat([hidden, markov], -1).float(), self.proj.weight.float())[..., 0]


class Calibration(nn.Module):
    """Turns what is known before draft k is drawn into the probability that it is accepted if it is reached.

    Per position and sampling temperature it is a logistic function of `calibration_features`. Without fitted weights
    the confidence head is taken at its word.
    """

    def __init__(self):
        super().__init__()
        self.weights: dict[float, list[list[float]]] = {}  # sampling temperature -> one row of weights per position

    def load(self, directory: Path) -> None:
        """Use what `train.py --calibrate` fitted, if the checkpoint directory has it. Raises ValueError if it is damaged."""
        path = Path(directory) / "calibration.json"
        if path.exists():
            try:
                fitted = json.loads(path.read_text(encoding="utf-8"))["confidence_weights"]
                self.weights = {float(temperature): rows for temperature, rows in fitted.items()}
                table = torch.tensor(list(self.weights.values()), dtype=torch.float64)
                if table.dim() != 3 or table.shape[2] != 10 or not table.isfinite().all():
                    raise ValueError(f"shape {list(table.shape)}, allowed: temperatures by positions by 10 numbers")
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}: no confidence_weights: {type(error).__name__}: {error}") from None

    def forward(self, head: Tensor, draft_logits: Tensor, temperature: Tensor) -> Tensor:
        """head [R, gamma], draft_logits [R, gamma, V], temperature [R] -> confidence [R, gamma].

        Of the fitted sampling temperatures the nearest counts; positions beyond those fitted use the last one.
        """
        if not self.weights:
            return head.sigmoid()
        gamma, device = head.shape[1], head.device
        nearest = (temperature[:, None] - torch.tensor(list(self.weights), device=device)).abs().argmin(1)
        table = torch.tensor([(rows + rows[-1:] * gamma)[:gamma] for rows in self.weights.values()], device=device)
        return (calibration_features(head, draft_logits) * table[nearest]).sum(-1).sigmoid()


def calibration_features(head: Tensor, draft_logits: Tensor) -> Tensor:
    """One, the confidence head's logit, entropy and log-odds of the best token of the draft distribution at temperature
    1, and their products in pairs. head [...], draft_logits [..., V] -> [..., 10]."""
    log_q = draft_logits.float().log_softmax(-1)
    entropy, best = -(log_q.exp() * log_q).sum(-1), log_q.amax(-1)
    odds = best - (-best.expm1()).clamp(min=1e-6).log()
    x = torch.stack([torch.ones_like(head), head, entropy, odds], dim=-1)
    return torch.cat([x[..., i, None] * x[..., i:] for i in range(4)], dim=-1)


class Drafter(nn.Module):
    """Stages and heads; embedding and output head are the target's own modules. Call `allocate_cache` first."""

    def __init__(self, config: Config, num_stages: int, target: Transformer):
        super().__init__()
        self.config = config
        self.embed, self.head = target.embed, target.head
        self.main_proj = linear(len(config.dspark_target_layer_ids) * config.hidden_size, config.hidden_size)
        self.main_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.stages = nn.ModuleList(
            Block(config, BlockAttention(config, ratio=0), hash_routed=False) for _ in range(num_stages)
        )
        self.hc_head = HyperHead(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config)
        self.confidence_head: ConfidenceHead | None = ConfidenceHead(config)  # None: the checkpoint has none
        self.calibration = Calibration()
        self.register_buffer("frequencies", rope_frequencies(config, False), persistent=False)

    def allocate_cache(self, num_slots: int, max_len: int, max_chunk: int):
        """Context rings for `num_slots` sequences and a scratch slot; arguments as Transformer.allocate_cache.

        Elements of a slot: (sliding_window + max_chunk + 1) * head_dim per stage, and sliding_window * n_taps * hidden.
        """
        kind = {"device": self.embed.weight.device, "dtype": self.embed.weight.dtype}
        for stage in self.stages:
            stage.attn.allocate(num_slots + 1, max_len, max_chunk, **kind)
        width = len(self.config.dspark_target_layer_ids) * self.config.hidden_size
        taps = torch.zeros(num_slots + 1, self.config.sliding_window, width, **kind)
        self.register_buffer("taps", taps, persistent=False)  # what `keep` keeps

    def compile_draft(self) -> None:
        """Compile `draft` as one graph for any number of requests from 2 up, on its first call."""
        self.draft = torch.compile(self.draft, dynamic=True, fullgraph=True)

    def rope(self, position: Tensor) -> Rope:
        return rope_factors(position.flatten(), self.frequencies, self.config.head_dim)

    def store(self, taps: Tensor, seq_slot: Tensor, position: Tensor) -> None:
        """Turn the target's taps [T, n_taps * hidden] at (seq_slot, position) [T] into context keys of every stage."""
        main_x, rope = self.main_norm(self.main_proj(taps)), self.rope(position)
        for stage in self.stages:
            stage.attn.store(main_x, seq_slot, position, rope)

    def keep(self, taps: Tensor, seq_slot: Tensor, position: Tensor) -> None:
        """Keep taps for `catch_up`, for a fraction of what `store` costs. Arguments as for `store`; of each sequence no
        more than sliding_window of them."""
        self.taps[seq_slot, position % self.taps.shape[1]] = taps

    def catch_up(self, seq_slot: Tensor, first: Tensor, end: Tensor, most: int) -> None:
        """Store what was kept for positions first .. end - 1 of R sequences, at most `most` of each, as far as the window
        still reaches. seq_slot, first, end [R]."""
        size = self.taps.shape[1]
        position = end[:, None] - torch.arange(min(most, size), 0, -1, device=end.device)
        scratch = len(self.taps) - 1
        seq_slot = torch.where(position >= first[:, None], seq_slot[:, None], scratch).flatten()
        position = position.flatten()
        self.store(self.taps[seq_slot, position % size], seq_slot, position)

    def run_block(self, anchor: Tensor, seq_slot: Tensor, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """One pass over blocks [anchor, noise, noise, ...]; anchor, seq_slot, position [R].

        Returns hidden [R, length, hidden] and base logits [R, length, V]; input k predicts the token after it. Never
        fewer than dspark_block_size inputs are run: the stages were not trained on shorter blocks.
        """
        R, G = len(anchor), max(length, self.config.dspark_block_size)
        token = torch.full((R, G), self.config.dspark_noise_token_id, device=anchor.device)
        token[:, 0] = anchor
        back = torch.arange(self.config.sliding_window, 0, -1, device=anchor.device)
        rope = self.rope(position[:, None] + torch.arange(G, device=anchor.device))
        context = BlockContext(seq_slot[:, None], position[:, None] - back, rope)
        token = token.flatten()
        streams = self.embed(token)[:, None].expand(-1, self.config.hc_mult, -1)
        for stage in self.stages:
            streams = stage(streams, token, context)
        hidden = self.hc_head(streams.unflatten(0, (R, G))[:, :length].flatten(0, 1))
        return hidden.view(R, length, -1), self.head(self.norm(hidden)).view(R, length, -1)

    def draft(
        self,
        anchor: Tensor,
        seq_slot: Tensor,
        position: Tensor,
        warp: Warp,
        noise: Tensor,
        key: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a block for each of R requests, left to right through the Markov head.

        anchor, seq_slot, position [R]; warp of the R requests; noise [R, gamma] uniform in [0, 1); with key [R] drafts are
        drawn by `race` instead. Returns drafts [R, gamma], the distributions they were drawn from q [R, gamma, V], and
        calibrated confidence [R, gamma]: the probability that draft k is accepted if those before it are. It is
        computed from drafts before k, never from draft k itself.
        """
        gamma = noise.shape[1]
        hidden, base = self.run_block(anchor, seq_slot, position, gamma)
        tokens, logits, qs = [anchor], [], []
        for k in range(gamma):
            logits.append(base[:, k] + self.markov_head(tokens[k]))
            qs.append(distribution(logits[k], warp))
            tokens.append(sample(qs[k], noise[:, k]) if key is None else race(qs[k], key, position + k + 1))
        tokens = torch.stack(tokens, dim=1)
        if self.confidence_head is None:
            confidence = torch.ones(noise.shape, device=noise.device)
        else:
            head = self.confidence_head(hidden, self.markov_head.markov_w1(tokens[:, :-1]))
            confidence = self.calibration(head, torch.stack(logits, dim=1), warp.temperature)
        return tokens[:, 1:], torch.stack(qs, dim=1), confidence


def expected_calibration_error(predicted: Tensor, happened: Tensor, num_bins: int = 15) -> float:
    """Mean distance between predicted probability and observed frequency (Guo et al., 2017), bins of equal width.

    predicted [N] in [0, 1], happened [N] bool.
    """
    bins = (predicted * num_bins).long().clamp(max=num_bins - 1)
    gap = torch.zeros(num_bins).index_add(0, bins, predicted - happened.float())
    return (gap.abs().sum() / len(predicted)).item()


def fit_calibration(features: Tensor, survived: Tensor) -> list[list[float]]:
    """The weights of `Calibration` for one sampling temperature, position by position, left to right.

    features [N, gamma, F] (see `calibration_features`), survived [N, gamma] bool: were drafts 0..k all accepted. First
    a logistic regression over the blocks that reached position k, then sequential temperature scaling (DSpark section
    on calibration): the divisor that minimises the calibration error of the survival product, earlier positions fixed.
    """
    survival, fitted = torch.ones(len(features)), []
    grid = torch.logspace(-0.7, 0.7, 141)
    for k in range(features.shape[1]):
        reached = survived[:, k - 1] if k else torch.ones_like(survived[:, 0])
        weights = logistic_regression(features[reached, k], survived[reached, k])
        candidates = [survival * (features[:, k] @ weights / t).sigmoid() for t in grid]
        errors = [expected_calibration_error(candidate, survived[:, k]) for candidate in candidates]
        best = min(range(len(grid)), key=errors.__getitem__)
        fitted.append((weights / grid[best]).tolist())
        survival = candidates[best]
    return fitted


def logistic_regression(x: Tensor, y: Tensor, ridge: float = 0.01, steps: int = 30) -> Tensor:
    """Weights [F] with sigmoid(x @ weights) near y, by Newton's method. x [N, F], the first column all ones; y [N] bool."""
    scale = x.double().std(0).clamp(min=1e-9)
    scale[0] = 1.0
    x, y, weights = x.double() / scale, y.double(), torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(steps):
        p = (x @ weights).sigmoid()
        curvature = (x * (p * (1 - p))[:, None]).T @ x + ridge * torch.eye(len(weights))
        weights += torch.linalg.solve(curvature, x.T @ (y - p) - ridge * weights)
    return (weights / scale).float()
