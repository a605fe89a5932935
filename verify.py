"""Adaptive verification: which draft slots to verify, where they lie in the flat step, and which tokens come out.

Whether draft k is verified must not depend on draft k (non-anticipation), or the output distribution bends. So the
budget B comes from confidences that are at least one step old, and the B slots go to the highest survivals of the
current step: the survival of slot k depends on drafts before k only, and slots behind it score lower.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampling import ACCEPT, FINAL, distribution, sample, uniform


def admit(survival: Tensor, limit: Tensor, budget: int) -> Tensor:
    """Admit the `budget` best draft slots of all requests. Ties go to the earlier position, then the earlier request.

    survival [R, gamma], not rising along a row (a rise by rounding is levelled); limit [R]: how many drafts of each request may be verified at all;
    budget <= limit.sum(). Returns admitted [R]: a prefix length per request, summing to the budget.
    """
    R, gamma = survival.shape
    slot = torch.arange(gamma, device=survival.device)
    survival = survival.cummin(1).values
    score = torch.where(slot < limit[:, None], survival, -1.0).T.flatten()  # position-major: a stable sort breaks ties
    best = score.argsort(descending=True, stable=True)[:budget]
    return torch.zeros(R, dtype=torch.int64, device=survival.device).index_add_(0, best % R, torch.ones_like(best))


def best_budget(survival: np.ndarray, num_sampling: int, cost_ms: np.ndarray) -> int:
    """The number of draft slots that maximises expected tokens per millisecond (host).

    survival [S]: of every available slot, in any order, at least one step old; num_sampling: requests that emit a
    token this step whatever is verified; cost_ms [<= S + 1]: the whole step's predicted time with B slots verified.
    """
    gain = np.sort(survival)[::-1][: len(cost_ms) - 1].cumsum()
    expected_tokens = num_sampling + np.concatenate([[0.0], gain])
    return int(np.argmax(expected_tokens / cost_ms))


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
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
) -> Accepted:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023) over all spans at once.

    logits [M, V] of the target; drafts [R, gamma]; q [R, gamma, V]: what the drafts were drawn from; admitted,
    temperature, key (random), position (of the anchor) [R]. Draft x at k is accepted with probability
    min(1, p(x) / q(x)); the first rejection draws from (p - q)+, a fully accepted span draws a bonus token from p.
    At temperature 0 both are one-hot, which makes this "accept while equal to the argmax".
    """
    R, gamma = drafts.shape
    p = distribution(logits, temperature[spans.row])  # [M, V]
    slot = torch.arange(gamma, device=drafts.device)
    source = (spans.start[:, None] + slot).clamp(max=len(p) - 1)  # [R, gamma] the row of p that judges each draft
    p_draft = p[source, drafts]
    q_draft = q.gather(2, drafts[..., None])[..., 0]
    passed = uniform(key, position, ACCEPT, gamma) * q_draft < p_draft
    accepted = (passed & (slot < admitted[:, None])).long().cumprod(1).sum(1)
    weights = p[spans.start + accepted]  # [R, V] p where the span stopped
    if gamma:
        residual = (weights - q[torch.arange(R, device=q.device), accepted.clamp(max=gamma - 1)]).clamp(min=0)
        rejected = (accepted < admitted) & (residual.sum(-1) > 0)  # a residual is empty only through rounding
        weights = torch.where(rejected[:, None], residual, weights)
    final = sample(weights, uniform(key, position, FINAL, 1)[:, 0])
    emitted = torch.cat([drafts, final[:, None]], dim=1)
    emitted = emitted.scatter(1, accepted[:, None], final[:, None])
    return Accepted(emitted, accepted)
