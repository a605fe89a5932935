"""Distributions after temperature, draws from them, and the counter-based random numbers that drive every draw.

A random number is a pure function of (seed, request, anchor position, purpose), so no generator state has to be kept,
copied or rolled back, and neighbours in the batch cannot disturb it. With a fixed draft length a request's output is
therefore the same alone and in company. With adaptive verification at a temperature above 0 it is not: the company, and
the measured costs, decide how many drafts are verified, so the anchors and the numbers drawn there move. Its distribution
is the target's either way.
"""

import torch
from torch import Tensor

DRAFT, VERIFY = range(2)  # purposes: drawing draft tokens; accepting them and drawing the residual or bonus token


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


def distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [..., V], temperature [...] -> probabilities [..., V] in float32; one-hot at the maximum for temperature 0."""
    logits = logits.float()
    best = logits.argmax(-1, keepdim=True)
    below_best = logits - logits.gather(-1, best)  # <= 0: a tiny temperature cannot overflow it
    warm = temperature[..., None] > 0
    p = (below_best / torch.where(warm, temperature[..., None], 1.0)).softmax(-1)
    return torch.where(warm, p, torch.zeros_like(p).scatter_(-1, best, 1.0))


def sample(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-transform draw: weights [..., V] (not necessarily normalised), u [...] in [0, 1) -> token [...].

    The sums are float64, so that a rare token keeps its probability behind a long cumulative sum.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = u[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)
