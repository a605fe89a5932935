"""Decisions, given tables and survivals: budgets, whether to draft at all, and which tables are refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import random_checkpoint

from engine import Engine, SamplingParams
from profile_costs import CostTable, convex_below, padding_grid
from verify import best_budget, early_stop_budget, gains
from weights import cache_buffers

META = {"device": "cpu", "dtype": "float32", "model": "m", "mode": "eager", "context_len": 8}


def table(padded=False):
    return CostTable(META, [(1, 1.0), (4, 2.0)], [(1, 10.0), (2, 12.0), (4, 11.0), (8, 20.0)], padded)


def test_costs_are_monotone_interpolated_and_extrapolated():
    costs = table().verify_ms(12)
    assert costs[[1, 2, 4, 6, 8]] == pytest.approx([10, 11, 11, 15.5, 20])  # the outlier at 2 is pulled down
    assert costs[12] == pytest.approx(20 + 4 * 10 / 7)
    assert (np.diff(costs) >= 0).all()
    assert table().draft_ms(4) == pytest.approx([1, 1, 4 / 3, 5 / 3, 2])


@given(st.lists(st.floats(1, 100), min_size=1, max_size=20))
def test_convex_below(costs):
    costs = np.array(costs)
    curve = convex_below(costs)
    assert (curve <= costs + 1e-9).all() and (np.diff(curve, n=2) >= -1e-9).all()
    assert curve[0] == costs[0] and curve[-1] == costs[-1]
    if (np.diff(costs, n=2) >= 0).all():
        assert curve == pytest.approx(costs)


def test_padded_costs_are_a_staircase():
    assert table(padded=True).verify_ms(8)[1:] == pytest.approx([10, 11, 11, 11, 20, 20, 20, 20])


def test_padding_grid():
    grid = padding_grid(300)
    assert grid[:6] == [1, 2, 4, 8, 16, 24] and grid[-4:] == [256, 272, 288, 300]


@pytest.mark.parametrize(
    ("verify_points", "message"),
    [
        ([], "no verify costs"),
        ([(1, 5.0), (64, 5.1)], "flat"),
        ([(1, -5.0), (64, 50.0)], "positive"),
        ([(4, 5.0), (2, 50.0)], "must rise"),
    ],
)
def test_useless_tables_are_refused(verify_points, message):
    with pytest.raises(ValueError, match=message):
        CostTable(META, [], verify_points)


@pytest.mark.parametrize("key", ["device", "dtype", "model", "mode"])
def test_a_table_from_elsewhere_is_refused(key, tmp_path):
    path = tmp_path / "table.json"
    table().save(path)
    assert set(json.loads(path.read_text())) == {"meta", "draft_cost_ms", "verify_cost_ms", "padded"}
    assert CostTable.load(path, META, padded=False) == table()
    with pytest.raises(ValueError, match=f"measured for {key}"):
        CostTable.load(path, META | {key: "other"}, padded=False)
    with pytest.raises(ValueError, match="padded"):
        CostTable.load(path, META, padded=True)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 5), st.randoms(use_true_random=False))
def test_early_stop_never_looks_behind_the_place_where_it_stops(survival, num_sampling, random):
    cost = np.cumsum([1.0] + [random.random() for _ in survival])
    survival = np.array(survival)
    budget = early_stop_budget(gains(survival), num_sampling, cost)
    ranked = np.sort(survival)[::-1]
    expected = num_sampling + np.concatenate([[0], ranked.cumsum()])
    rates = expected / cost
    assert all(rates[b + 1] > rates[b] for b in range(budget))
    assert budget == len(survival) or rates[budget + 1] <= rates[budget]
    hidden = ranked.copy()
    hidden[budget + 1 :] *= random.random()  # whatever lies behind changes nothing
    assert early_stop_budget(gains(hidden), num_sampling, cost) == budget


def test_on_a_staircase_the_rules_differ():
    survival, cost = np.full(8, 0.9), np.array([10.0, 20, 20, 20, 20, 20, 20, 20, 20])
    assert early_stop_budget(gains(survival), 4, cost) == 0  # stops at the edge
    assert best_budget(gains(survival), 4, cost) == 8  # sees the plateau behind it


def engine_with(table, tmp_path, **options):
    model = random_checkpoint(tmp_path / "model")
    table.meta["model"] = str(model)
    table.save(tmp_path / "table.json")
    return Engine(str(model), max_num_seqs=8, max_model_len=400, cost_table=str(tmp_path / "table.json"), **options)


def drafted_steps(engine, num_requests, max_tokens):
    records = []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.generate([[5, 6]] * num_requests, params, records.append)
    return [any(r["drafts"] for r in record["requests"]) for record in records]


def test_drafting_stops_when_it_cannot_pay_and_is_probed_again(tmp_path):
    dear = CostTable(dict(META), [(1, 50.0), (8, 60.0)], [(1, 10.0), (48, 480.0)])
    drafted = drafted_steps(engine_with(dear, tmp_path), 4, 200)
    probes = [i for i, d in enumerate(drafted) if d]
    assert 1 <= sum(np.diff(probes) > 1) <= 5 and len(probes) < 40  # it does look again


def test_drafting_pays_only_where_it_raises_throughput(tmp_path):
    cheap = CostTable(dict(META), [(1, 0.1), (8, 0.2)], [(1, 10.0), (48, 11.0)])
    engine = engine_with(cheap, tmp_path)
    recent = engine.recent_survival
    for survival, pays in ((0.9, True), (0.0, False)):
        recent[:] = survival
        assert [engine.drafting_pays(R) for R in (1, 4, 8)] == [pays] * 3
    recent[::4] = 0.9  # one good block of four
    assert engine.drafting_pays(4)


def test_a_draft_that_pays_for_one_request_need_not_pay_for_eight(tmp_path):
    table = CostTable(dict(META), [(1, 1.0), (8, 30.0)], [(1, 10.0), (8, 15.0), (48, 90.0)])
    engine = engine_with(table, tmp_path)
    engine.recent_survival[:] = 0.6
    assert [engine.drafting_pays(R) for R in (8, 1, 8, 1)] == [False, True, False, True]


@pytest.mark.parametrize("undrafted", [1, 3, 90])
def test_a_pause_in_drafting_changes_no_draft(undrafted, tmp_path):
    """Keys made when drafting goes on, from taps kept in the pause, are those that would have been stored at once."""
    table = CostTable(dict(META), [(1, 0.1), (8, 0.2)], [(1, 10.0), (48, 11.0)])
    prompts = [[5 + i % 3, 6, 7 + i] * (1 + 9 * i) for i in range(7)]
    params = [SamplingParams(max_tokens=60 + 30 * i, ignore_eos=True) for i in range(7)]
    seen = []
    for lazy in (True, False):
        engine, records = engine_with(table, tmp_path, max_num_batched_tokens=40), []
        assert engine.lazy
        engine.lazy = lazy
        engine.drafting_pays = lambda R, engine=engine: engine.step_index % (undrafted + 2) < 2
        engine.generate(prompts, params, records.append, concurrency=3)
        seen.append([block for record in records for block in record["requests"]])
    assert len(seen[0]) == len(seen[1]) and sum(bool(block["drafts"]) for block in seen[0]) > 20
    for kept, stored in zip(*seen):
        assert (kept["drafts"], kept["emitted"]) == (stored["drafts"], stored["emitted"])
        np.testing.assert_allclose(kept["confidence"], stored["confidence"], atol=1e-5)


@pytest.mark.parametrize("rule", ["auto", "stale", "early-stop"])
def test_padding_changes_no_output(rule, tmp_path):
    prompts = [[5, 6, 7] * 9, [8], [9, 10] * 3]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    model = str(random_checkpoint(tmp_path))
    plain = Engine(model, max_num_seqs=4, max_model_len=200, num_speculative_tokens=0).generate(prompts, params)
    padded = Engine(model, max_num_seqs=4, max_model_len=200, padded=True, budget_rule=rule)
    assert [c.token_ids for c in padded.generate(prompts, params)] == [c.token_ids for c in plain]
    assert padded.cost_table.padded


@pytest.mark.parametrize("options", [{}, {"budget_rule": "early-stop"}, {"adaptive_verification": False}])
def test_padding_writes_to_no_request(options, tmp_path):
    """Every cache row of a real request is what it is without padding."""
    model, caches = str(random_checkpoint(tmp_path)), []
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for padded in (False, True):
        points = [(1, 1.0), (4, 2.0)], [(1, 10.0), (4, 11.0), (24, 20.0)]
        table = CostTable(dict(META), *points, padded=False)  # the same decisions with and without
        engine = Engine(model, max_num_seqs=4, max_model_len=200, cost_table=table, padded=padded, **options)
        engine.early_stop = options.get("budget_rule") == "early-stop"
        engine.generate([[5, 6, 7] * 9, [8], [9, 10] * 3, [11, 12]], params)
        caches.append([cache[:-1] for m in (engine.target, engine.drafter) for cache in cache_buffers(m)])
    assert len(caches[0]) > 10 and engine.forward.recorded and engine.draft.recorded
    for plain, padded in zip(*caches):
        torch.testing.assert_close(plain, padded, atol=1e-4, rtol=1e-4)


def test_one_recording_per_size(tmp_path):
    engine = Engine(
        str(random_checkpoint(tmp_path)), max_num_seqs=5, max_num_batched_tokens=30, max_model_len=64, padded=True
    )
    sizes = [1, 2, 4, 8, 16, 24, 30]
    assert engine.token_grid == sizes and {size for size, _ in engine.forward.recorded} == set(sizes)
    assert {size for size, _ in engine.draft.recorded} == set(engine.request_grid) == {1, 2, 4, 5}
    engine.generate([[5, 6, 7] * 6] * 7, SamplingParams(max_tokens=20, ignore_eos=True))
    assert {size for size, _ in engine.forward.recorded} == set(sizes)  # nothing but these was ever run
