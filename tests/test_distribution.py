"""The joint distribution of the first three tokens, counted over many requests, against the target's own, enumerated.

A correct engine fails one of these tests in fewer than 1 in 10,000 runs: each p-value is compared with 1e-4 divided by
their number. The same harness must catch five ways of being wrong, which is how we know that it could.
"""

import inspect
import itertools

import pytest
import torch
from random_checkpoints import random_checkpoint
from safetensors.torch import load_file, save_file

import engine as engine_module
import verify
from engine import Engine, SamplingParams
from profile_costs import CostTable
from verify import best_budget, gains

V, PROMPT = 6, [3, 4, 5, 3, 4]
SMOOTH = [(1, 0.1), (256, 1.0)], [(1, 10.0), (256, 20.0), (768, 24.0)]
CLIFF = [(1, 0.1), (4, 0.1)], [(1, 10.0), (2, 20.4), (4, 20.6)]  # two drafts pay where 1.05 are expected to survive
CASES = {
    "early-stop": ({}, {}),
    "cold": ({}, {"temperature": 0.5}),
    "hot": ({}, {"temperature": 1.3}),
    "stale": ({"budget_rule": "stale"}, {}),
    "fixed": ({"adaptive_verification": False}, {}),
    "64-at-once": ({"max_num_seqs": 64}, {}),
    "greedy-drafts": ({"draft_sample_method": "greedy"}, {}),
    "top-k": ({}, {"top_k": 3}),
    "top-p": ({}, {"top_p": 0.7}),
    "top-k-p": ({"budget_rule": "stale"}, {"top_k": 4, "top_p": 0.8}),
    "top-k-greedy-drafts": ({"draft_sample_method": "greedy", "adaptive_verification": False}, {"top_k": 3}),
    "coupled": ({"acceptance": "coupled"}, {}),
    "coupled-stale-top-p": ({"acceptance": "coupled", "budget_rule": "stale"}, {"top_p": 0.8}),
    "coupled-greedy-drafts": ({"acceptance": "coupled", "draft_sample_method": "greedy"}, {"top_k": 4}),
    "one-by-one": ({"max_num_seqs": 1, "table": CLIFF}, {}),
    "one-by-one-stale": ({"max_num_seqs": 1, "table": CLIFF, "budget_rule": "stale"}, {}),
    "among-prefills": ({"max_num_seqs": 24, "max_num_batched_tokens": 128, "others": True}, {}),
}
THRESHOLD = 1e-4 / len(CASES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    shape = {"num_hidden_layers": 1, "compress_ratios": [4, 0], "dspark_target_layer_ids": [0], "hc_sinkhorn_iters": 1}
    directory = random_checkpoint(tmp_path_factory.mktemp("model"), seed=5, num_stages=1, vocab_size=V, **shape)
    tensors = load_file(directory / "model.safetensors")
    flatter = [name for name in tensors if name == "head.weight" or name.endswith("markov_w2.weight")]
    assert len(flatter) == 2
    for name in flatter:  # so that at temperature 1 every token is likely enough
        tensors[name] *= 0.4
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def make_engine(model, table=SMOOTH, **options):
    meta = {"device": "cpu", "dtype": "float32", "model": model, "mode": "eager", "context_len": 8}
    options = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 64} | options
    return Engine(model, num_speculative_tokens=2, cost_table=CostTable(meta, *table), **options)


def warped(logits, params):
    """Temperature, top-k, top-p, one token after another in plain Python. logits [V] -> probabilities [V]."""
    weight = (logits.double() / params.temperature).exp().tolist()
    ranked = sorted(range(V), key=lambda t: -weight[t])[: params.top_k or V]
    total, kept = sum(weight[t] for t in ranked), []
    for token in ranked:
        if sum(weight[t] for t in kept) < params.top_p * total:
            kept.append(token)
    p = torch.zeros(V, dtype=torch.float64)
    p[kept] = torch.tensor([weight[t] for t in kept], dtype=torch.float64)
    return p / p.sum()


@torch.inference_mode()
def exact_joint(engine, params):
    """[V, V, V] from the target alone."""
    joint, position = torch.zeros(V, V, V, dtype=torch.float64), torch.arange(len(PROMPT) + 2)
    for a, b in itertools.product(range(V), repeat=2):
        token, last = torch.tensor([*PROMPT, a, b]), torch.arange(3) + len(PROMPT) - 1
        logits, _ = engine.target(token, position * 0, position, last)
        first, second, third = (warped(row, params) for row in logits)
        joint[a, b] = first[a] * second[b] * third
    assert joint.sum().item() == pytest.approx(1)
    return joint


def p_value(model, options, sampling, N=6_000):
    """Of the chi-square statistic of N requests' first three tokens; 0 if an impossible one occurred."""
    options = dict(options)
    N = {1: N // 5, 24: N // 2}.get(options.get("max_num_seqs"), N)  # the slow ones
    others = options.pop("others", False)
    engine = make_engine(model, **options)
    params = SamplingParams(**{"temperature": 1.0} | sampling, max_tokens=4, ignore_eos=True)
    expected = exact_joint(engine, params).flatten() * N
    prompts = [PROMPT] * N
    if others:  # every fourth request has a long prompt, which is stored in pieces beside the others' decoding
        prompts = [p for i in range(N // 3) for p in (*[PROMPT] * 3, [5, 3, 4, 4] * 9)]
    completions = engine.generate(prompts, params)
    verified, accepted = engine.stats.reached.sum(), engine.stats.accepted.sum()
    assert accepted > 0.1 * N and verified - accepted > 0.1 * N  # acceptance, residual and bonus all matter
    index = [(t[0] * V + t[1]) * V + t[2] for c in completions if c.prompt_token_ids == PROMPT for t in [c.token_ids]]
    observed = torch.bincount(torch.tensor(index), minlength=V**3).double()
    assert observed.sum() == N
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5  # pooled into one cell
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = len(expected) - 1 - int(rare.sum() == 0)
    return torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2).item()


@pytest.mark.parametrize("N", [6_000, pytest.param(30_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_the_first_three_tokens_follow_the_target(case, N, model):
    assert p_value(model, *CASES[case], N) > THRESHOLD


def mutate(monkeypatch, function, old, new):
    """Replace `old` by `new` in the source of a function of verify.py, for the engine."""
    source = inspect.getsource(function)
    assert source.count(old) == 1
    namespace = dict(vars(verify))
    exec(source.replace(old, new), namespace)  # noqa: S102
    monkeypatch.setattr(engine_module, function.__name__, namespace[function.__name__])


def test_harness_catches_an_inverted_acceptance_ratio(model, monkeypatch):
    mutate(monkeypatch, verify.accept, "* q_draft < p_draft", "* p_draft < q_draft")
    assert p_value(model, *CASES["fixed"]) < THRESHOLD


def test_harness_catches_a_residual_drawn_from_p(model, monkeypatch):
    mutate(
        monkeypatch, verify.accept, "(rejected[:, None], residual, weights)", "(rejected[:, None], weights, weights)"
    )
    assert p_value(model, *CASES["fixed"]) < THRESHOLD


def test_harness_catches_an_unwarped_bonus(model, monkeypatch):
    unwarped = "distribution(logits, Warp(warp.of(spans.row).temperature))[spans.start + accepted]"
    mutate(monkeypatch, verify.accept, "weights = p[spans.start + accepted]", f"weights = {unwarped}")
    assert p_value(model, *CASES["top-p"]) < THRESHOLD


def test_harness_catches_q_of_another_temperature(model, monkeypatch):
    mutate(monkeypatch, verify.accept, "p_draft = ", "q = q**0.5 / (q**0.5).sum(-1, keepdim=True); p_draft = ")
    assert p_value(model, *CASES["fixed"]) < THRESHOLD


def test_harness_catches_a_global_search_over_current_confidences(model, monkeypatch):
    def peeking(self, decoding, limits, num_fixed):
        most, R = sum(limits), len(decoding)
        if not most:
            return 0
        survival = (
            torch.tensor([r.confidence[:limit] for r, limit in zip(decoding, limits)]).cumprod(1).flatten().numpy()
        )
        return best_budget(gains(survival), R, self.draft_ms[R] + self.verify_ms[num_fixed : num_fixed + most + 1])

    monkeypatch.setattr(Engine, "choose_budget", peeking)
    assert p_value(model, *CASES["one-by-one-stale"], N=10_000) < THRESHOLD
