"""Adaptive verification: which draft slots to verify, where they lie in the flat step, and which tokens come out.

Whether draft k is verified must not depend on draft k (non-anticipation), or the output distribution bends. So the
budget B comes from confidences that are at least one block old (`best_budget`), or from a walk down the current ones
that never looks past the place where it stops (`early_stop_budget`). The B slots go to the highest survivals of the
current step: the survival of slot k depends on drafts before k only, and slots behind it score lower.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampling import VERIFY, Warp, distribution, race, sample, uniform


def admit(survival: Tensor, limit: Tensor, budget: int) -> Tensor:
    """Admit the `budget` best draft slots of all requests. Ties go to the earlier position, then the earlier request.

    survival [R, gamma], not rising along a row (a rise by rounding is levelled); limit [R]: how many drafts of each
    request may be verified at all; budget <= limit.sum(). Returns admitted [R]: a prefix length per request, summing to
    the budget.
    """
    R, gamma = survival.shape
    slot = torch.arange(gamma, device=survival.device)
    survival = survival.cummin(1).values
    score = torch.where(slot < limit[:, None], survival, -1.0).T.flatten()  # position-major: a stable sort breaks ties
    best = score.argsort(descending=True, stable=True)[:budget]
    return torch.zeros(R, dtype=torch.int64, device=survival.device).index_add_(0, best % R, torch.ones_like(best))


def gains(survival: np.ndarray) -> np.ndarray:
    """Tokens expected from the best B slots, for B = 0 .. S; survival [..., S] in any order -> [..., S + 1] (host)."""
    best_first = -np.sort(-survival, axis=-1)
    return np.concatenate([np.zeros_like(survival[..., :1]), best_first.cumsum(-1)], axis=-1)


def best_budget(gain: np.ndarray, num_sampling: int, cost_ms: np.ndarray) -> int:
    """Rule `stale`: the budget B of the highest throughput. `gain` must come from blocks before those to be verified.

    A global search may look at any slot, so with the current survivals it would let a draft's own value, through the
    slots behind it, decide whether the draft is verified. gain [S + 1]: see `gains`; num_sampling: requests that emit a
    token this step whatever is verified; cost_ms: the whole step's predicted time with B slots verified, B = 0 .. at most S.
    """
    return int(np.argmax((num_sampling + gain[: len(cost_ms)]) / cost_ms))


def early_stop_budget(gain: np.ndarray, num_sampling: int, cost_ms: np.ndarray) -> int:
    """Rule `early-stop` (DSpark, algorithm 1): go down the current slots, stop at the first that does not pay.

    Arguments as for `best_budget`, but `gain` may be of the very drafts to be verified: nothing behind the place where
    it stops was looked at. With convex costs it is the best budget, too: gains are concave, so throughput has one peak.
    """
    throughput = (num_sampling + gain[: len(cost_ms)]) / cost_ms
    return int(np.argmin(np.diff(throughput, append=-np.inf) > 0))


class Layout(NamedTuple):
    """Where the verify spans of R requests lie among the M = R + B decode tokens of a step."""

    token: Tensor  # [M] anchor and admitted drafts, request after request
    row: Tensor  # [M] which request
    offset: Tensor  # [M] 0 for the anchor, k for draft k
    start: Tensor  # [R] index of each anchor


def layout(anchor: Tensor, drafts: Tensor, admitted: Tensor, budget: int) -> Layout:
    """anchor [R], drafts [R, gamma], admitted [R] summing to `budget` -> spans; no shape depends on a value."""
    R = len(anchor)
    length = admitted + 1
    start = length.cumsum(0) - length
    row = torch.repeat_interleave(torch.arange(R, device=anchor.device), length, output_size=R + budget)
    offset = torch.arange(R + budget, device=anchor.device) - start[row]
    token = torch.cat([anchor[:, None], drafts], dim=1)[row, offset]
    return Layout(token, row, offset, start)


class Accepted(NamedTuple):
    emitted: Tensor  # [R, gamma + 1] accepted drafts, then the residual or bonus token, then junk
    accepted: Tensor  # [R] drafts accepted; accepted + 1 tokens are emitted


def accept(
    logits: Tensor,
    spans: Layout,
    drafts: Tensor,
    q: Tensor,
    admitted: Tensor,
    warp: Warp,
    key: Tensor,
    position: Tensor,
) -> Accepted:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023) over all spans at once.

    logits [M, V] of the target; drafts [R, gamma]; q [R, gamma, V]: what the drafts were drawn from; admitted [R]; warp of
    the R requests; key (random) and position (of the anchor) [R]. Draft x at k is accepted with probability
    min(1, p(x) / q(x)); the first rejection draws from (p - q)+, a fully accepted span draws a bonus token from p.
    At temperature 0 both are one-hot, which makes this "accept while equal to the argmax".
    """
    R, gamma = drafts.shape
    p = distribution(logits, warp.of(spans.row))  # [M, V]
    judge = judges(spans, gamma)
    p_draft = p[judge, drafts]
    q_draft = q.gather(2, drafts[..., None])[..., 0]
    noise = uniform(key, position, VERIFY, 1 + gamma)  # for the final token, then one per draft: gamma is the company's
    accepted = prefix(noise[:, 1:] * q_draft < p_draft, admitted)
    weights = p[spans.start + accepted]  # [R, V] p where the span stopped
    if gamma:
        residual = (weights - q[torch.arange(R, device=q.device), accepted.clamp(max=gamma - 1)]).clamp(min=0)
        rejected = (accepted < admitted) & (residual.sum(-1) > 0)  # a residual is empty only through rounding
        weights = torch.where(rejected[:, None], residual, weights)
    return emit(drafts, accepted, sample(weights, noise[:, 0]))


def accept_coupled(
    logits: Tensor, spans: Layout, drafts: Tensor, admitted: Tensor, warp: Warp, key: Tensor, position: Tensor
) -> Accepted:
    """Target and drafter draw with the same random numbers; drafts are accepted while they are what the target draws.

    Arguments as for `accept`. What comes out is what the target alone would draw, whatever was drafted or verified.
    """
    p = distribution(logits, warp.of(spans.row))
    drawn = race(p, key[spans.row], position[spans.row] + spans.offset + 1)  # [M]
    accepted = prefix(drawn[judges(spans, drafts.shape[1])] == drafts, admitted)
    return emit(drafts, accepted, drawn[spans.start + accepted])


def judges(spans: Layout, gamma: int) -> Tensor:
    """The row of the step [R, gamma] whose logits judge each draft: that of the token before it."""
    return (spans.start[:, None] + torch.arange(gamma, device=spans.start.device)).clamp(max=len(spans.token) - 1)


def prefix(passed: Tensor, admitted: Tensor) -> Tensor:
    """passed [R, gamma] bool, admitted [R] -> how many drafts of each request pass before the first that does not [R]."""
    return (passed & (torch.arange(passed.shape[1], device=passed.device) < admitted[:, None])).long().cumprod(1).sum(1)


def emit(drafts: Tensor, accepted: Tensor, final: Tensor) -> Accepted:
    """The accepted drafts of [R, gamma], then the final token [R]."""
    emitted = torch.cat([drafts, final[:, None]], dim=1)
    return Accepted(emitted.scatter(1, accepted[:, None], final[:, None]), accepted)


def logprobs(logits: Tensor, spans: Layout, emitted: Tensor, num_best: int) -> Tensor:
    """Log-probabilities of the target, before any warping, of emitted tokens [R, gamma + 1] and of the num_best best.

    Returns [R, gamma + 1, 1 + 2 * num_best]: the emitted token's, then those of the best, then which tokens these are.
    """
    judged = logits.log_softmax(-1)[judges(spans, emitted.shape[1])]  # [R, gamma + 1, V]
    best = judged.topk(num_best, dim=-1)
    return torch.cat([judged.gather(2, emitted[..., None]), best.values, best.indices.float()], dim=2)
