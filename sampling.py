"""Distributions after temperature, draws from them, and the counter-based random numbers that drive every draw.

A random number is a pure function of (seed, request, anchor position, purpose), so no generator state has to be kept,
copied or rolled back, and neighbours in the batch cannot disturb it. With a fixed draft length a request's output is
therefore the same alone and in company. With adaptive verification at a temperature above 0 it is not: the company, and
the measured costs, decide how many drafts are verified, so the anchors and the numbers drawn there move. Its distribution
is the target's either way. Coupled acceptance draws by `race` instead, keyed by the position of the token itself; the text
is then a function of the seed alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# purposes: drawing draft tokens; accepting them and drawing the residual or bonus token; one number per vocabulary entry
DRAFT, VERIFY, RACE = range(3)


class Warp(NamedTuple):
    """How R rows of logits become distributions. top_k and top_p are None where no row of the step uses them."""

    temperature: Tensor  # [R]; 0 is greedy
    top_k: Tensor | None = None  # [R] int64 most tokens to keep
    top_p: Tensor | None = None  # [R] probability mass to keep, after top_k

    def of(self, rows: Tensor) -> "Warp":
        return Warp(*(None if t is None else t[rows] for t in self))


def mix64(x: Tensor) -> Tensor:
    """Scrambles int64 counters: the finaliser of splitmix64 (Steele, Lea and Flood, 2014), in wrapping arithmetic."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))  # a logical shift: >> on int64 keeps the sign
        x = x * (multiplier - (1 << 64) if multiplier >> 63 else multiplier)
    return x


def request_key(seed: int, index: int) -> int:
    """The int64 key of request `index` under `seed`: hashed twice, so neighbouring seeds and requests are unrelated."""
    return mix64(mix64(torch.tensor(seed)) ^ mix64(torch.tensor(~index))).item()


def uniform(key: Tensor, position: Tensor, purpose: int, count: int) -> Tensor:
    """Uniform numbers in [0, 1), [R, count] float64, for request keys [R] and positions [R].

    `position` must be the position of the anchor that opens the block. The position of the token to be drawn would
    repeat after a rejection, and a number that has already shaped an earlier block's confidences, hence a budget, would
    then decide a draft of this one: admission would have peeked.
    """
    lane = torch.arange(count, device=key.device) * 4 + purpose
    bits = mix64(mix64(key ^ mix64(position + 1))[:, None] ^ mix64(lane + (1 << 40)))
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def distribution(logits: Tensor, warp: Warp) -> Tensor:
    """logits [R, V] -> probabilities [R, V] in float32 after temperature, top-k and top-p; one-hot for temperature 0."""
    logits = logits.float()
    best = logits.argmax(-1, keepdim=True)
    below_best = logits - logits.gather(-1, best)  # <= 0: a tiny temperature cannot overflow it
    warm = warp.temperature[:, None] > 0
    p = (below_best / torch.where(warm, warp.temperature[:, None], 1.0)).softmax(-1)
    if warp.top_k is not None:
        p = trim(p, warp.top_k, warp.top_p)
    return torch.where(warm, p, torch.zeros_like(p).scatter_(-1, best, 1.0))


def trim(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep of p [R, V] the top_k [R] best tokens, of those the fewest that reach the mass top_p [R]; renormalised.

    Ties go to the smaller token id.
    """
    ranked, token = p.sort(dim=-1, descending=True, stable=True)
    ranked = torch.where(torch.arange(p.shape[-1], device=p.device) < top_k[:, None], ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    mass_before = ranked.cumsum(-1) - ranked  # 0 for the best: it always stays
    ranked = torch.where(mass_before < top_p[:, None], ranked, 0.0)
    return torch.zeros_like(p).scatter(-1, token, ranked / ranked.sum(-1, keepdim=True))


def sample(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-transform draw: weights [..., V] (not necessarily normalised), u [...] in [0, 1) -> token [...].

    The sums are float64, so that a rare token keeps its probability behind a long cumulative sum.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = u[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)


def race(p: Tensor, key: Tensor, position: Tensor) -> Tensor:
    """Draw from p [R, V] by exponential race (the Gumbel-max trick): token x has the time E_x / p_x, the first one wins.

    The E are keyed by (request key [R], position [R] of the token to draw) and nothing else, so a draft and the target
    that race at one position agree as often as their distributions allow (Daliri et al., 2025). Returns tokens [R].
    """
    exponential = -uniform(key, position, RACE, p.shape[-1]).log()
    return (p / exponential).argmax(-1)
