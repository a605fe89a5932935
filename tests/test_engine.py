"""The engine's promises: greedy text does not depend on speculation, batch or policy; stops and slots are right."""

import pytest
from soak import soak

from engine import DEFAULT_MODEL, Engine, SamplingParams
from profile_costs import CostTable
from train import held_out_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)


LENGTHS = [1, 2, 3, 5, 8, 17, 33, 48, 64, 65, 80, 100]  # windows are still filling for some and have wrapped for others


@pytest.fixture(scope="module", params=[12, pytest.param(32, marks=pytest.mark.slow)])
def prompts(request):
    """12 held-out prompts, or 32 with -m slow."""
    return [held_out_prompts(1, seed=i, length=LENGTHS[i % len(LENGTHS)])[0] for i in range(request.param)]


@pytest.fixture(scope="module", autouse=True)
def cost_table(tmp_path_factory):
    """Costs as a laptop has them, so that the adaptive policy decides the same on every machine, however busy."""
    meta = {"device": "cpu", "dtype": "float32", "model": DEFAULT_MODEL, "mode": "eager", "context_len": 64}
    path = tmp_path_factory.mktemp("costs") / "table.json"
    CostTable(meta, [(1, 1.5), (8, 3.0)], [(1, 10.0), (8, 11.0), (48, 30.0)]).save(path)
    make_engine.cost_table = str(path)


def make_engine(**options):
    return Engine(DEFAULT_MODEL, **{"max_num_seqs": 8, "cost_table": make_engine.cost_table} | options)


@pytest.fixture(scope="module")
def plain(prompts):
    """Greedy outputs without speculation."""
    engine = make_engine(num_speculative_tokens=0)
    return [c.token_ids for c in engine.generate(prompts, GREEDY)]


POLICIES = {"early-stop": {"budget_rule": "early-stop"}, "stale": {"budget_rule": "stale"}} | {
    f"fixed-{k}": {"adaptive_verification": False, "num_speculative_tokens": k} for k in range(1, 6)
}
SLOW = {"fixed-1", "fixed-3", "fixed-4"}  # run with -m slow
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in POLICIES]


def few(prompts):
    """How many of them to run one at a time: 4 of 12, all of 32."""
    return 4 if len(prompts) == 12 else len(prompts)


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("policy", NAMES)
def test_greedy_output_does_not_depend_on_speculation(policy, at_once, prompts, plain):
    count = few(prompts) if at_once == 1 else len(prompts)
    engine = make_engine(max_num_seqs=at_once, **POLICIES[policy])
    assert [c.token_ids for c in engine.generate(prompts[:count], GREEDY)] == plain[:count]
    assert engine.stats.report()["mean_accepted_length"] > 1.2  # drafts were really verified and accepted


def test_greedy_output_without_speculation_one_at_a_time(prompts, plain):
    engine = make_engine(num_speculative_tokens=0, max_num_seqs=1)
    assert [c.token_ids for c in engine.generate(prompts[: few(prompts)], GREEDY)] == plain[: few(prompts)]


@pytest.fixture(scope="module")
def crowd():
    """64 requests of mixed lengths, and their outputs alone, one at a time, without speculation."""
    requests = [held_out_prompts(1, seed=100 + i, length=1 + 7 * i % 61)[0] for i in range(64)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 11 * i % 29, ignore_eos=True) for i in range(64)]
    engine = make_engine(num_speculative_tokens=0, max_num_seqs=1, max_model_len=256)
    return requests, params, [c.token_ids for c in engine.generate(requests, params)]


@pytest.mark.parametrize("policy", [*NAMES, "none"])
def test_greedy_output_does_not_depend_on_load(policy, crowd):
    """All 64 share steps, prompts arrive in pieces, requests join and leave: everybody's text stays as it was alone."""
    requests, params, alone = crowd
    options = POLICIES.get(policy, {"num_speculative_tokens": 0})
    engine = make_engine(max_num_seqs=48, max_num_batched_tokens=96, max_model_len=256, **options)
    assert [c.token_ids for c in engine.generate(requests, params)] == alone


def test_cache_size_is_the_documented_formula():
    engine = make_engine(max_num_seqs=3, max_model_len=600)
    c, chunk = engine.config, engine.max_chunk
    taps = c.sliding_window * len(c.dspark_target_layer_ids) * c.hidden_size
    expected = ((c.sliding_window + chunk + 1) * c.head_dim + taps) * 4  # the drafter
    for ratio in c.compress_ratios[: c.num_hidden_layers]:
        entries, overlap = 600 // ratio if ratio else 0, 2 if ratio == 4 else 1
        expected += (c.sliding_window + chunk + entries + 1) * c.head_dim * 4
        expected += (overlap * ratio + chunk) * overlap * c.head_dim * 8 if ratio else 0
        if ratio == 4 and entries > c.index_topk:
            expected += (entries + 1) * c.index_head_dim * 4 + (8 + chunk) * 2 * c.index_head_dim * 8
    assert engine.cache_bytes_per_request == expected


def test_a_short_soak():
    engine, memory, ends = soak(num_requests=60, at_once=8, batch=20)
    assert not engine.running and not engine.waiting and len(memory) == 3
    assert sum(ends.values()) == 60 and {"length", "cut"} <= set(ends)


@pytest.mark.parametrize("policy", [{}, {"adaptive_verification": False}])
def test_blocks_longer_than_those_of_the_training(policy, prompts, plain):
    engine = make_engine(num_speculative_tokens=7, **policy)
    assert [c.token_ids for c in engine.generate(prompts[:8], GREEDY)] == plain[:8]


def test_long_prompts_in_chunks_beside_decoding(prompts, plain):
    """Few tokens per step: prompts arrive in pieces while others decode."""
    long = held_out_prompts(1, seed=99, length=400)[0]
    engine = make_engine(max_num_batched_tokens=24)
    outputs = [c.token_ids for c in engine.generate([*prompts[:6], long, *prompts[6:12]], GREEDY)]
    alone = make_engine(num_speculative_tokens=0).generate([long], GREEDY)[0].token_ids
    assert outputs == [*plain[:6], alone, *plain[6:12]]


def test_max_tokens_inside_an_accepted_span(prompts, plain):
    engine = make_engine()
    for max_tokens in range(1, 12):
        completions = engine.generate(
            prompts[:8], SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        )
        assert [c.token_ids for c in completions] == [tokens[:max_tokens] for tokens in plain[:8]]
        assert {c.finish_reason for c in completions} == {"length"}


def test_a_stop_token_inside_an_accepted_span_ends_the_output(prompts, plain):
    engine = make_engine(adaptive_verification=False)
    inside = 0
    for i in range(12):
        stop = plain[i][20]
        expected = plain[i][: plain[i].index(stop)]
        records = []
        params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True, stop_token_ids=(stop,))
        completion = engine.generate([prompts[i]], params, records.append)[0]
        assert (completion.token_ids, completion.finish_reason) == (expected, "stop")
        last = records[-1]["requests"][0]
        inside += len(last["emitted"]) < last["accepted"]  # an accepted draft came after the stop token
    assert inside > 0
    assert len(engine.free_slots) == engine.max_num_seqs


def test_eos_stops_unless_ignored(prompts, plain):
    engine = make_engine()
    engine.config.eos_token_id = plain[0][30]
    expected = plain[0][: plain[0].index(plain[0][30])]
    stopped = engine.generate([prompts[0]], SamplingParams(temperature=0.0, max_tokens=128))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (expected, "stop")
    assert engine.generate([prompts[0]], GREEDY)[0].token_ids == plain[0]


def test_a_reused_slot_starts_afresh(prompts, plain):
    """Two slots for many requests, sampled ones in between, then the same engine again."""
    engine = make_engine(max_num_seqs=2)
    engine.generate(prompts[:10], SamplingParams(temperature=1.3, max_tokens=70))
    assert [c.token_ids for c in engine.generate(prompts[:12], GREEDY)] == plain[:12]
    assert sorted(engine.free_slots) == [0, 1] and not engine.running and not engine.waiting


def test_an_interrupted_call_leaves_nothing_behind(prompts, plain):
    """Requests left over would share their random numbers with the next call's: admission would peek through them."""
    engine = make_engine(max_num_seqs=2)

    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts[:6], GREEDY, interrupt)
    records = []
    assert engine.generate([prompts[0]], GREEDY, records.append)[0].token_ids == plain[0]
    assert all(len(record["requests"]) <= 1 for record in records)


def test_max_model_len_ends_the_output(prompts, plain):
    engine = make_engine(max_model_len=100)
    prompt = prompts[7]
    completion = engine.generate([prompt], GREEDY)[0]
    assert completion.token_ids == plain[7][: 100 - len(prompt)] and completion.finish_reason == "length"


def test_seeded_sampling_repeats_and_depends_on_the_seed(prompts):
    engine = make_engine(adaptive_verification=False)

    def outputs(seed, count):
        params = SamplingParams(temperature=1.0, max_tokens=24, seed=seed, ignore_eos=True)
        return [c.token_ids for c in engine.generate(prompts[:count], params)]

    first = outputs(0, 8)
    assert outputs(0, 8) == first
    assert outputs(0, 1) == first[:1]  # alone or in company
    assert outputs(1, 8) != first


def test_trace_records_are_consistent(prompts):
    engine, outputs = make_engine(), {}
    records = []
    completions = engine.generate(prompts[:8], SamplingParams(temperature=1.0, max_tokens=40), records.append)
    for record in records:
        assert sum(r["admitted"] for r in record["requests"]) == record["budget"]
        assert len({r["index"] for r in record["requests"]}) == len(record["requests"])
        for r in record["requests"]:
            output = outputs.setdefault(r["index"], [])
            prompt = prompts[r["index"]]
            assert r["position"] == len(prompt) + len(output) - 1
            assert r["anchor"] == (prompt + output)[-1]
            assert r["accepted"] <= r["admitted"] <= len(r["drafts"])
            assert r["emitted"][: r["accepted"]] == r["drafts"][: len(r["emitted"])][: r["accepted"]]
            output += r["emitted"]
    assert [outputs[c.index] for c in completions] == [c.token_ids for c in completions]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "no tokens"), ([5] * 1024, "max_model_len"), ([4000], "4000"), ([-1], "-1"), (["x"], "'x'|x")],
)
def test_bad_prompts_are_refused(prompt, message):
    engine = make_engine(num_speculative_tokens=0)
    with pytest.raises(ValueError, match=message):
        engine.generate([prompt])
    assert engine.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=2))  # still usable
