"""Sampling as a user sees it: warping, edge cases, seeds, stops, coupled text."""

import pytest
import torch

from engine import DEFAULT_MODEL, Engine, SamplingParams
from profile_costs import CostTable
from sampling import RACE, Warp, distribution, race, request_key, sample, trim, uniform
from train import held_out_prompts
from verify import accept, layout

META = {"device": "cpu", "dtype": "float32", "model": DEFAULT_MODEL, "mode": "eager", "context_len": 64}
TABLE = CostTable(META, [(1, 0.5), (16, 1.0)], [(1, 10.0), (96, 15.0)])


def make_engine(**options):
    return Engine(**{"max_num_seqs": 16, "max_model_len": 256, "cost_table": TABLE} | options)


def test_trim_keeps_the_best_tokens():
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).expand(6, 4)
    top_k = torch.tensor([4, 2, 4, 2, 1000, 1])  # more than the vocabulary: all
    top_p = torch.tensor([1.0, 1.0, 0.65, 0.5, 0.05, 1.0])
    expected = [[0.1, 0.4, 0.2, 0.3], [0, 4 / 7, 0, 3 / 7], [0, 4 / 7, 0, 3 / 7]] + 3 * [[0, 1.0, 0, 0]]
    torch.testing.assert_close(trim(p, top_k, top_p), torch.tensor(expected))
    ties = trim(torch.full((1, 4), 0.25), torch.tensor([2]), torch.tensor([1.0]))
    torch.testing.assert_close(ties, torch.tensor([[0.5, 0.5, 0, 0]]))


def one_draft(p_logits, q, draft, warp, N=20_000):
    """accept() for N requests with one draft each, all of the same p, q and draft."""
    drafts, ones = torch.full((N, 1), draft), torch.ones(N, dtype=torch.int64)
    spans = layout(torch.zeros(N, dtype=torch.int64), drafts, ones, N)
    warp = Warp(*(None if t is None else torch.full((N,), t) for t in warp))
    return accept(p_logits[spans.offset], spans, drafts, q.expand(N, 1, -1), ones, warp, torch.arange(N), ones)


@pytest.mark.parametrize("warp", [Warp(0.0), Warp(1.0, 1, 1.0), Warp(1.0, 4, 1e-6), Warp(1e-3)])
def test_a_target_with_a_single_token_left(warp):
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.5], [3.0, 0.0, 0.0, 0.0]])
    wrong = one_draft(logits, torch.full((4,), 0.25), 2, warp, 100)
    assert (wrong.accepted == 0).all() and (wrong.emitted[:, 0] == 1).all()
    right = one_draft(logits, torch.full((4,), 0.25), 1, warp, 100)
    assert (right.accepted == 1).all() and (right.emitted == torch.tensor([1, 0])).all()


def test_p_equal_to_q_leaves_no_residual():
    logits = torch.randn(2, 4)
    q = distribution(logits[:1], Warp(torch.tensor([0.7])))[0]
    assert (one_draft(logits, q, 3, Warp(0.7)).accepted == 1).all()


def test_a_token_that_the_draft_can_not_give_comes_from_the_residual():
    p = torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.0, 0.6, 0.4])
    N = 20_000
    drawn = torch.cat([one_draft(torch.stack([p, p]).log(), q, 1, Warp(1.0), int(0.6 * N)).emitted,
                       one_draft(torch.stack([p, p]).log(), q, 2, Warp(1.0), int(0.4 * N)).emitted])  # fmt: skip
    torch.testing.assert_close(torch.bincount(drawn[:, 0]) / N, p, atol=0.02, rtol=0)


@pytest.mark.parametrize(("temperature", "logits"), [(1e-3, [1.0, 1.002, 0.9]), (100.0, [90.0, 20.0, -50.0])])
def test_extreme_temperatures_keep_the_distribution(temperature, logits):
    p = distribution(torch.tensor([logits]), Warp(torch.tensor([temperature])))
    exact = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1)
    torch.testing.assert_close(p[0].double(), exact, atol=1e-3, rtol=0)
    N = 100_000
    key, position = torch.arange(N), torch.zeros(N, dtype=torch.int64)
    for drawn in (sample(p.expand(N, 3), uniform(key, position, 0, 1)[:, 0]), race(p.expand(N, 3), key, position)):
        torch.testing.assert_close(torch.bincount(drawn, minlength=3) / N, exact.float(), atol=0.01, rtol=0)


def test_a_race_never_draws_what_has_no_probability():
    p = torch.tensor([[0.0, 1.0, 0.0], [1e-30, 0.0, 0.0]]).repeat(500, 1)
    assert (race(p, torch.arange(1000), torch.arange(1000)) == torch.tensor([1, 0]).repeat(500)).all()


def test_numbers_of_neighbouring_requests_are_unrelated():
    keys = torch.tensor([request_key(0, i) for i in range(400)] + [request_key(1, i) for i in range(400)])
    numbers = torch.stack([uniform(keys, torch.full_like(keys, p), RACE, 25) for p in range(10)])  # [10, 800, 25]
    assert len(numbers.unique()) == numbers.numel()
    for pair in ((numbers[:, 1:400], numbers[:, :399]), (numbers[:, 400:], numbers[:, :400])):  # next index, next seed
        cells = (pair[0] * 16).long() * 16 + (pair[1] * 16).long()  # uniform on the square
        observed, expected = torch.bincount(cells.flatten(), minlength=256), cells.numel() / 256
        assert ((observed - expected) ** 2 / expected).sum() < 255 + 4.9 * (2 * 255) ** 0.5 + 10  # p < 1e-6


COUPLED = {"none": {"num_speculative_tokens": 0}, "early-stop": {"budget_rule": "early-stop"},
           "stale": {"budget_rule": "stale"}, "greedy-drafts": {"draft_sample_method": "greedy"}}  # fmt: skip
COUPLED |= {f"fixed-{k}": {"adaptive_verification": False, "num_speculative_tokens": k} for k in range(1, 6)}
SLOW = {"fixed-1", "fixed-3", "fixed-4"}  # run with -m slow
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COUPLED]


@pytest.fixture(scope="module", params=[16, pytest.param(64, marks=pytest.mark.slow)])
def coupled_alone(request):
    """16 requests, or 64 with -m slow, and their texts without speculation, one at a time."""
    count = range(request.param)
    prompts = [held_out_prompts(1, seed=300 + i, length=1 + 5 * i % 41)[0] for i in count]
    params = [SamplingParams(seed=9, max_tokens=12, ignore_eos=True, top_p=0.9 if i % 8 == 0 else 1) for i in count]
    engine = make_engine(num_speculative_tokens=0, acceptance="coupled", max_num_seqs=1)
    return prompts, params, [c.token_ids for c in engine.generate(prompts, params)]


@pytest.mark.parametrize("policy", NAMES)
def test_coupled_text_is_that_of_plain_sampling(policy, coupled_alone):
    prompts, params, plain = coupled_alone
    engine = make_engine(acceptance="coupled", **COUPLED[policy])
    for at_once in (1, 16):
        assert [c.token_ids for c in engine.generate(prompts, params, concurrency=at_once)] == plain
        if policy != "none":
            assert engine.stats.report()["mean_accepted_length"] > 1.1


@pytest.mark.parametrize("options", [{"adaptive_verification": False}, {"acceptance": "coupled"}])
def test_same_seed_same_text_alone_and_in_company(options):
    prompts = [held_out_prompts(1, seed=400 + i, length=3 + i)[0] for i in range(33)]
    engine = make_engine(max_num_seqs=33, **options)
    for seed in (0, 1):
        params = SamplingParams(seed=seed, max_tokens=24, ignore_eos=True)
        together = engine.generate(prompts, params)
        assert engine.generate(prompts[:1], params)[0] == together[0]
        assert engine.generate(prompts, params, concurrency=5) == together
    other = engine.generate(prompts, SamplingParams(seed=2, max_tokens=24, ignore_eos=True))
    assert sum(a.token_ids == b.token_ids for a, b in zip(together, other)) <= 2
    same = engine.generate(prompts[:1] * 8, SamplingParams(max_tokens=24, ignore_eos=True))
    assert len({tuple(c.token_ids) for c in same}) > 4  # requests do not share their numbers


@pytest.mark.parametrize("adaptive", [True, False])
def test_stop_strings_end_the_text_wherever_they_fall(adaptive):
    """Every string of 1, 3 and 8 characters of a text, so inside tokens, across two tokens and across two steps."""
    engine = make_engine(adaptive_verification=adaptive)
    prompt = held_out_prompts(1, seed=3, length=30)[0]
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    whole = engine.generate([prompt], SamplingParams(**greedy))[0]
    stops = sorted({whole.text[i : i + n] for n in (1, 3, 8) for i in range(len(whole.text) - n + 1)})
    params = [SamplingParams(**greedy, stop=("never found", stop)) for stop in stops]
    for stop, c in zip(stops, engine.generate([prompt] * len(stops), params)):
        assert c.finish_reason == "stop" and c.text == whole.text[: whole.text.find(stop)]
        assert c.token_ids == whole.token_ids[: len(c.token_ids)]  # they end with the token that completes the string
        assert stop in engine.decode(c.token_ids) and stop not in engine.decode(c.token_ids[:-1])


def test_of_two_stop_strings_the_earlier_in_the_text_counts():
    engine = make_engine()
    whole = engine.generate(["import os\n"], SamplingParams(temperature=0.0, max_tokens=24))[0].text
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=(whole[9:12], whole[5:14]))
    assert engine.generate(["import os\n"], params)[0].text in (whole[:5], whole[: whole.find(whole[9:12])])


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_p": float("nan")},
     {"stop": "text"}, {"stop": ("",)}, {"logprobs": -1}, {"logprobs": 101}, {"seed": -1}, {"max_tokens": 0}],
)  # fmt: skip
def test_bad_sampling_params_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*, allowed: "):
        SamplingParams(**wrong)
