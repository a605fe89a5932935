"""Admission, layout and budget as properties; acceptance by exact enumeration on small distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import Warp, distribution, uniform
from verify import accept, admit, best_budget, gains, layout

CONFIDENCE = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1, width=32))  # many ties, many saturated


@st.composite
def admissions(draw):
    """Random survivals [R, gamma], limits [R] and a budget that fits."""
    R, gamma = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    confidence = draw(st.lists(st.lists(CONFIDENCE, min_size=gamma, max_size=gamma), min_size=R, max_size=R))
    limit = draw(st.lists(st.integers(0, gamma), min_size=R, max_size=R))
    return torch.tensor(confidence).cumprod(1), torch.tensor(limit), draw(st.integers(0, sum(limit)))


@settings(max_examples=500, deadline=None)
@given(admissions())
def test_admission(case):
    survival, limit, budget = case
    admitted = admit(survival, limit, budget)
    assert admitted.sum() == budget
    assert (admitted <= limit).all() and (admitted >= 0).all()
    slot = torch.arange(survival.shape[1])
    inside, allowed = slot < admitted[:, None], slot < limit[:, None]  # prefixes, as lengths are all there is
    chosen, refused = survival[inside], survival[allowed & ~inside]
    if len(chosen) and len(refused):
        assert chosen.min() >= refused.max()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_ties_go_to_earlier_positions(R, gamma, data):
    budget = data.draw(st.integers(0, R * gamma))
    admitted = admit(torch.ones(R, gamma), torch.full((R,), gamma), budget)
    assert admitted.max() - admitted.min() <= 1
    assert admitted.tolist() == sorted(admitted.tolist(), reverse=True)


def test_a_saturated_later_slot_cannot_come_first():
    survival = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.4, 0.4]])  # confidence 1 behind the first draft of request 0
    assert admit(survival, torch.tensor([3, 3]), 2).tolist() == [1, 1]


@settings(max_examples=300, deadline=None)
@given(admissions())
def test_layout(case):
    survival, limit, budget = case
    R, gamma = survival.shape
    anchor, drafts = torch.arange(R) + 1000, torch.arange(R * gamma).view(R, gamma)
    admitted = admit(survival, limit, budget)
    spans = layout(anchor, drafts, admitted, budget)
    expected = [
        (r, k, (anchor[r] if k == 0 else drafts[r, k - 1]).item()) for r in range(R) for k in range(admitted[r] + 1)
    ]
    assert list(zip(spans.row.tolist(), spans.offset.tolist(), spans.token.tolist(), strict=True)) == expected
    assert spans.token[spans.start].tolist() == anchor.tolist()


def test_budget_maximises_tokens_per_ms():
    rng = np.random.default_rng(0)
    for _ in range(300):
        survival, num_sampling = rng.random(rng.integers(1, 30)), rng.integers(1, 8)
        cost = np.sort(rng.random(len(survival) + 1)) + 0.1
        ordered = sorted(survival, reverse=True)
        rates = [(num_sampling + sum(ordered[:B])) / cost[B] for B in range(len(cost))]
        assert rates[best_budget(gains(survival), num_sampling, cost)] == pytest.approx(max(rates))


def test_budget_with_free_and_with_expensive_slots():
    survival = np.full(10, 0.6)
    assert best_budget(gains(survival), 2, np.full(11, 5.0)) == 10
    assert best_budget(gains(survival), 2, np.arange(1, 12) * 5.0) == 0
    assert best_budget(gains(survival), 2, np.full(4, 5.0)) == 3  # capped by the tokens that a step may have


V, GAMMA = 5, 2


def run_accept(p_logits, q, drafts, admitted, temperature, key):
    """accept() for len(key) independent requests with the same p, q and admission; drafts [N, GAMMA]."""
    N = len(key)
    admitted = torch.full((N,), admitted)
    spans = layout(torch.zeros(N, dtype=torch.int64), drafts, admitted, int(admitted.sum()))
    logits = p_logits[spans.offset]
    q = q.expand(N, GAMMA, V)
    return accept(logits, spans, drafts, q, admitted, Warp(torch.full((N,), temperature)), key, torch.zeros(N).long())


@pytest.mark.parametrize("admitted", [0, 1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_emitted_tokens_follow_the_target(admitted, temperature):
    """Chi-square of the first emitted token against p, exactly known; a correct engine fails once in 1e6 runs."""
    torch.manual_seed(admitted)
    p_logits, q = torch.randn(GAMMA + 1, V) * 1.5, torch.randn(GAMMA, V).softmax(-1)
    N = 200_000
    drafts = torch.multinomial(q, N, replacement=True).T
    result = run_accept(p_logits, q, drafts, admitted, temperature, torch.randint(2**62, (N,)))
    p = distribution(p_logits, Warp(torch.full((GAMMA + 1,), temperature)))
    observed, expected = torch.bincount(result.emitted[:, 0], minlength=V), N * p[0].double()
    assert ((observed - expected) ** 2 / expected).sum() < 33.4  # quantile of chi-square with 4 degrees of freedom
    if admitted:
        second = result.emitted[result.accepted >= 1, 1]
        observed, expected = torch.bincount(second, minlength=V), len(second) * p[1].double()
        assert ((observed - expected) ** 2 / expected).sum() < 33.4
        first = drafts[:, 0]
        rate = (result.accepted >= 1).float().mean()
        assert rate == pytest.approx(torch.minimum(p[0], q[0]).sum().item(), abs=0.005)
        assert (result.emitted[result.accepted >= 1, 0] == first[result.accepted >= 1]).all()


def test_greedy_accepts_exactly_the_argmax():
    p_logits = torch.tensor([[0.0, 1, 0, 0, 0], [0, 0, 2, 0, 0], [0, 0, 0, 3, 0]])
    drafts = torch.tensor([[1, 2], [1, 0], [0, 2]])
    q = torch.nn.functional.one_hot(drafts, V).float()
    admitted = torch.tensor([2, 2, 2])
    spans = layout(torch.zeros(3, dtype=torch.int64), drafts, admitted, 6)
    key = torch.arange(3)
    result = accept(p_logits[spans.offset], spans, drafts, q, admitted, Warp(torch.zeros(3)), key, key)
    assert result.accepted.tolist() == [2, 1, 0]
    assert [row[: n + 1] for row, n in zip(result.emitted.tolist(), result.accepted.tolist())] == [
        [1, 2, 3],
        [1, 2],
        [1],
    ]


def test_extreme_temperatures():
    logits = torch.tensor([[3.0, 5.0, 5.0, -40.0]]) * 10
    for cold in (1e-3, 1e-30, 1e-40):
        p = distribution(logits, Warp(torch.tensor([cold])))
        torch.testing.assert_close(p, torch.tensor([[0.0, 0.5, 0.5, 0.0]]))
    torch.testing.assert_close(
        distribution(logits, Warp(torch.tensor([1e6]))), torch.full((1, 4), 0.25), atol=1e-3, rtol=0
    )


def test_an_equal_draft_distribution_is_always_accepted():
    torch.manual_seed(0)
    p_logits = torch.randn(GAMMA + 1, V)
    q = p_logits[:GAMMA].softmax(-1)
    drafts = torch.multinomial(q, 5000, replacement=True).T
    assert (run_accept(p_logits, q, drafts, 2, 1.0, torch.arange(5000)).accepted == 2).all()


def test_uniform_numbers_are_uniform_and_unrelated():
    keys = torch.arange(200)
    numbers = torch.stack(
        [uniform(keys, torch.full_like(keys, p), purpose, 8) for p in range(20) for purpose in range(3)]
    )
    flat = numbers.flatten()
    assert 0 <= flat.min() and flat.max() < 1 and len(flat.unique()) == len(flat)
    observed, expected = torch.histc(flat.float(), 100, 0, 1), len(flat) / 100
    assert ((observed - expected) ** 2 / expected).sum() < 180  # 99 degrees of freedom, p < 1e-6
    for shifted in (numbers[1:, :, :], numbers[:, 1:, :], numbers[:, :, 1:]):  # neighbours in position, key and lane
        base = numbers[: shifted.shape[0], : shifted.shape[1], : shifted.shape[2]]
        assert abs(torch.corrcoef(torch.stack([base.flatten(), shifted.flatten()]))[0, 1]) < 0.03
