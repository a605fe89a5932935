"""The drafter against a slow, plain version of itself that reads the checkpoint file and nothing else of the project.

The reference was written from the facts about the DSpark release (V4 blocks with mHC, Markov head, confidence head)
before drafter.py was read, so that the two agree only if both are right.
"""

import functools
import itertools
import json
import math

import pytest
import torch
from random_checkpoints import random_checkpoint
from safetensors.torch import load_file

from drafter import calibration_features, expected_calibration_error, fit_calibration
from sampling import Warp
from train import area_under_curve
from weights import load_checkpoint

# ---- the reference ---------------------------------------------------------------------------------------------------


@functools.cache
def read_checkpoint(directory):
    return load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())


def rms(x, eps, weight=1.0):
    return x * torch.rsqrt(x.square().mean() + eps) * weight


def rotate(x, position, config, sign=1):
    """RoPE of one head vector: interleaved pairs of the last qk_rope_head_dim channels. sign=-1 rotates back."""
    x, dim = x.clone(), config["qk_rope_head_dim"]
    start = len(x) - dim
    for i in range(0, dim, 2):
        angle = sign * position * config["rope_theta"] ** (-i / dim)
        cos, sin = math.cos(angle), math.sin(angle)
        even, odd = float(x[start + i]), float(x[start + i + 1])
        x[start + i], x[start + i + 1] = even * cos - odd * sin, even * sin + odd * cos
    return x


def swiglu(x, w, name, config):
    limit = config["swiglu_limit"]
    gate = (w[f"{name}.w1.weight"] @ x).clamp(max=limit)
    up = (w[f"{name}.w3.weight"] @ x).clamp(-limit, limit)
    return w[f"{name}.w2.weight"] @ (gate * torch.sigmoid(gate) * up)


def moe(x, w, name, config):
    scores = torch.sqrt(torch.log1p(torch.exp(w[f"{name}.gate.weight"] @ x)))
    biased = (scores + w[f"{name}.gate.bias"]).tolist()
    chosen = sorted(range(len(biased)), key=lambda e: -biased[e])[: config["num_experts_per_tok"]]
    total = sum(float(scores[e]) for e in chosen)
    y = swiglu(x, w, f"{name}.shared_experts", config)
    for e in chosen:
        weight = float(scores[e]) / total * config["routed_scaling_factor"]
        y = y + weight * swiglu(x, w, f"{name}.experts.{e}", config)
    return y


def attention(xs, context, first, anchor_position, w, name, config):
    """Block inputs xs (list of [D]) at anchor_position, anchor_position + 1, ...; context rows at first, first + 1, ..."""
    eps, heads, dim = config["rms_norm_eps"], config["num_attention_heads"], config["head_dim"]

    def key_value(x, position):  # one shared head, K = V
        return rotate(rms(w[f"{name}.wkv.weight"] @ x, eps, w[f"{name}.kv_norm.weight"]), position, config)

    keys = [key_value(x, first + i) for i, x in enumerate(context)]
    keys += [key_value(x, anchor_position + i) for i, x in enumerate(xs)]
    outs = []
    for i, x in enumerate(xs):
        low_rank = rms(w[f"{name}.wq_a.weight"] @ x, eps, w[f"{name}.q_norm.weight"])
        queries = (w[f"{name}.wq_b.weight"] @ low_rank).view(heads, dim)
        head_outs = []
        for h in range(heads):
            q = rotate(rms(queries[h], eps), anchor_position + i, config)
            scores = [float(q @ k) * dim**-0.5 for k in keys]
            sink = float(w[f"{name}.attn_sink"][h])
            top = max(scores + [sink])
            weights = [math.exp(s - top) for s in scores]
            total = sum(weights) + math.exp(sink - top)
            mixed = sum(p / total * k for p, k in zip(weights, keys))
            head_outs.append(rotate(mixed, anchor_position + i, config, sign=-1))
        groups, rank = config["o_groups"], config["o_lora_rank"]
        per_group = heads // groups
        low = [
            w[f"{name}.wo_a.weight"][g * rank : (g + 1) * rank]
            @ torch.cat(head_outs[g * per_group : (g + 1) * per_group])
            for g in range(groups)
        ]
        outs.append(w[f"{name}.wo_b.weight"] @ torch.cat(low))
    return outs


def hyper_connect(streams, w, name, config):
    """pre [4], post [4], comb [4, 4] of one token's residual streams [4, D]."""
    n, eps = config["hc_mult"], config["hc_eps"]
    x = w[f"{name}_fn"] @ rms(streams.flatten(), config["rms_norm_eps"])
    scale, base = w[f"{name}_scale"], w[f"{name}_base"]
    pre = torch.sigmoid(x[:n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(x[n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = torch.softmax((x[2 * n :] * scale[2] + base[2 * n :]).view(n, n), dim=1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(config["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return pre, post, comb


def sub_layer(streams, w, hc_name, norm_name, config, f):
    """One mHC sub-layer over the block: f maps the list of normed inputs [D] to the list of outputs [D]."""
    mixes = [hyper_connect(s, w, hc_name, config) for s in streams]
    inputs = [
        rms(sum(pre[i] * s[i] for i in range(len(s))), config["rms_norm_eps"], w[norm_name])
        for s, (pre, _, _) in zip(streams, mixes)
    ]
    new = []
    for s, out, (_, post, comb) in zip(streams, f(inputs), mixes):
        n = range(len(s))
        new.append(torch.stack([post[j] * out + sum(comb[i, j] * s[i] for i in n) for j in n]))
    return new


def reference_draft(directory, taps, anchor, position, gamma, temperature, noise):
    """One block of the DSpark drafter for one request: no cache, no batch, one token, head and expert at a time.

    taps      [>= position, n_taps * D]  of context positions 0, 1, ...; only those below `position` are used
    noise     gamma uniform numbers
    Returns drafts (list of gamma tokens), q [gamma, V], confidence [gamma] (not calibrated).
    """
    w, config = read_checkpoint(directory)
    eps = config["rms_norm_eps"]
    num_stages = 1 + max(int(k.split(".")[1]) for k in w if k.startswith("mtp."))
    last = f"mtp.{num_stages - 1}"

    first = max(0, position - config["sliding_window"])
    context = [rms(w["mtp.0.main_proj.weight"] @ t, eps, w["mtp.0.main_norm.weight"]) for t in taps[first:position]]

    tokens = [anchor] + [config["dspark_noise_token_id"]] * (max(gamma, config["dspark_block_size"]) - 1)
    streams = [torch.stack([w["embed.weight"][t]] * config["hc_mult"]) for t in tokens]
    for stage in range(num_stages):
        name = f"mtp.{stage}"

        def attend(xs, name=name):
            return attention(xs, context, first, position, w, f"{name}.attn", config)

        def mix_experts(xs, name=name):
            return [moe(x, w, f"{name}.ffn", config) for x in xs]

        streams = sub_layer(streams, w, f"{name}.hc_attn", f"{name}.attn_norm.weight", config, attend)
        streams = sub_layer(streams, w, f"{name}.hc_ffn", f"{name}.ffn_norm.weight", config, mix_experts)

    drafts, qs, confidence, previous = [], [], [], anchor
    for k in range(gamma):
        s = streams[k]
        x = w[f"{last}.hc_head_fn"] @ rms(s.flatten(), eps)
        mix = torch.sigmoid(x * w[f"{last}.hc_head_scale"] + w[f"{last}.hc_head_base"]) + config["hc_eps"]
        h = sum(mix[i] * s[i] for i in range(len(s)))
        markov = w[f"{last}.markov_head.markov_w1.weight"][previous]
        logits = w["head.weight"] @ rms(h, eps, w[f"{last}.norm.weight"])
        logits = logits + w[f"{last}.markov_head.markov_w2.weight"] @ markov
        confidence.append(torch.sigmoid(w[f"{last}.confidence_head.proj.weight"][0] @ torch.cat([h, markov])))
        if temperature == 0:
            previous = int(logits.argmax())
            q = torch.zeros_like(logits)
            q[previous] = 1.0
        else:
            q = torch.softmax(logits / temperature, dim=0)
            threshold, cumulative, previous = float(noise[k]) * sum(q.tolist()), 0.0, len(q) - 1
            for token, mass in enumerate(q.tolist()):
                cumulative += mass
                if cumulative > threshold:
                    previous = token
                    break
        drafts.append(previous)
        qs.append(q)
    return drafts, torch.stack(qs), torch.stack(confidence)


# ---- helpers ---------------------------------------------------------------------------------------------------------

LENGTH = 340  # context positions: more than eight wrap-arounds of the ring
SHAPES = {
    "one-stage": {"num_stages": 1},
    "three-stages": {"num_stages": 3},
    "two-stages-odd": {  # where every epsilon, clamp and group shows in the result
        "num_stages": 2,
        "sliding_window": 7,
        "hc_eps": 0.03,
        "rms_norm_eps": 0.02,
        "hc_sinkhorn_iters": 2,
        "swiglu_limit": 0.5,
        "o_groups": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "qk_rope_head_dim": 8,
        "rope_theta": 500.0,
        "routed_scaling_factor": 2.5,
        "dspark_target_layer_ids": [0, 2],
        "dspark_noise_token_id": 5,
    },
}


def write_checkpoint(directory, name):
    return random_checkpoint(directory, seed=len(name), **SHAPES[name])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name of a shape -> directory of its checkpoint."""
    return functools.cache(lambda name: write_checkpoint(tmp_path_factory.mktemp(name), name))


def load_drafter(directory, num_slots, max_chunk):
    _, drafter = load_checkpoint(directory, torch.float32)
    drafter.allocate_cache(num_slots, LENGTH, max_chunk)
    return drafter


def random_taps(directory, num_requests, seed=0):
    config = read_checkpoint(directory)[1]
    width = len(config["dspark_target_layer_ids"]) * config["hidden_size"]
    return torch.randn(num_requests, LENGTH, width, generator=torch.Generator().manual_seed(seed))


def random_noise(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_equals_reference(block, directory, taps, anchor, position, temperature, noise):
    """block: what Drafter.draft returned for R requests; the rest per request, as it got them."""
    drafts, q, confidence = block
    for r in range(len(anchor)):
        expected_drafts, expected_q, expected_confidence = reference_draft(
            directory, taps[r], anchor[r].item(), position[r].item(), noise.shape[1], temperature[r].item(), noise[r]
        )
        where = f"request {r}, position {position[r]}, temperature {temperature[r]:.1f}"
        assert drafts[r].tolist() == expected_drafts, where
        for what, actual, expected in (("q", q[r], expected_q), ("confidence", confidence[r], expected_confidence)):
            error = (actual - expected).abs().max()
            assert error < 1e-4, f"{what} is off by {error}, {where}"


# ---- against the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [3, 5, 8])  # below, at and above dspark_block_size
@pytest.mark.parametrize("name", SHAPES)
def test_batch_equals_reference(name, gamma, checkpoint):
    directory, max_chunk = checkpoint(name), 24
    config = read_checkpoint(directory)[1]
    window = config["sliding_window"]
    ring = window + max_chunk
    position = torch.tensor([0, 1, window - 2, window, window + 1, ring, 2 * ring + 3, LENGTH - 1])
    R = len(position)
    generator = torch.Generator().manual_seed(gamma)
    slot = torch.randperm(R + 1, generator=generator)[:R]
    anchor = torch.randint(config["vocab_size"], (R,), generator=generator)
    temperature = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.7, 1.0, 0.0, 1.0])
    taps = random_taps(directory, R)
    noise = random_noise(R, gamma)
    noise[:2, 0], noise[2:4, 1] = 0.0, 1 - 2**-53  # both ends of the interval, greedy and sampled

    drafter = load_drafter(directory, R + 1, max_chunk)
    every_slot, every_row = torch.arange(R + 1).repeat_interleave(ring), torch.arange(ring).repeat(R + 1)
    drafter.store(torch.randn(len(every_row), taps.shape[2]), every_slot, every_row)  # what earlier requests left
    for first in range(0, LENGTH, max_chunk):
        parts = [(r, p) for p in range(first, min(first + max_chunk, LENGTH)) for r in range(R) if p < position[r]]
        if parts:
            row, place = torch.tensor(parts).T
            drafter.store(taps[row, place], slot[row], place)
    block = drafter.draft(anchor, slot, position, Warp(temperature), noise)

    assert [tuple(t.shape) for t in block] == [(R, gamma), (R, gamma, config["vocab_size"]), (R, gamma)]
    assert (block[1].sum(-1) - 1).abs().max() < 1e-5 and (block[2] - 0.5).abs().median() < 0.45
    assert_equals_reference(block, directory, taps, anchor, position, temperature, noise)


@pytest.mark.parametrize("wrong_tokens", ["most", "random"])
@pytest.mark.parametrize(("name", "gamma", "max_chunk"), [("one-stage", 5, 6), ("two-stages-odd", 7, 20)])
def test_rejected_drafts_leave_no_trace(name, gamma, max_chunk, wrong_tokens, checkpoint):
    """Chunks of right tokens with rejected ones behind them; a block is drafted after every chunk, over the wreckage.

    A chunk of one right token and gamma wrong ones is what a step with every draft rejected stores. With max_chunk =
    gamma + 1 the ring has no row to spare.
    """
    directory, R = checkpoint(name), 3
    config = read_checkpoint(directory)[1]
    generator = torch.Generator().manual_seed(gamma)
    taps, noise, temperature = random_taps(directory, R), random_noise(R, gamma), torch.tensor([1.0, 0.0, 1.0])
    drafter, slot = load_drafter(directory, R, max_chunk), torch.tensor([2, 0, 1])
    position = torch.tensor([0, 0, 0])
    step = 0
    while position.min() < 100:
        rows, places, stored = [], [], []
        for r in range(R):
            wrong = gamma if wrong_tokens == "most" else int(torch.randint(gamma + 1, (), generator=generator))
            right = 1 + int(torch.randint(max_chunk - wrong, (), generator=generator)) * (wrong_tokens == "random")
            first, next_position = position[r].item(), position[r].item() + right
            rows += [r] * (right + wrong)
            places += range(first, next_position + wrong)
            stored += [taps[r, first:next_position], 3 * torch.randn(wrong, taps.shape[2], generator=generator)]
            position[r] = next_position
        drafter.store(torch.cat(stored), slot[torch.tensor(rows)], torch.tensor(places))
        anchor = torch.randint(config["vocab_size"], (R,), generator=generator)
        block = drafter.draft(anchor, slot, position, Warp(temperature), noise)
        if step % 12 == 5 or position.min() >= 100:
            assert_equals_reference(block, directory, taps, anchor, position, temperature, noise)
        step += 1


# ---- what the confidence may depend on -------------------------------------------------------------------------------


def test_confidence_depends_on_earlier_drafts_only(checkpoint):
    directory, gamma, position = checkpoint("three-stages"), 6, torch.tensor([20, 11])
    drafter, slot, anchor = load_drafter(directory, 2, 24), torch.tensor([0, 1]), torch.tensor([7, 8])
    for r in range(2):
        drafter.store(random_taps(directory, 2)[r, :20], torch.full((20,), r), torch.arange(20))
    sampled, noise = torch.ones(2), random_noise(2, gamma)
    drafts, _, confidence = drafter.draft(anchor, slot, position, Warp(sampled), noise)
    for k in range(gamma):
        changed = noise.clone()
        changed[0, k] = (noise[0, k] + 0.5) % 1
        other_drafts, _, other_confidence = drafter.draft(anchor, slot, position, Warp(sampled), changed)
        assert other_drafts[0, k] != drafts[0, k]
        assert torch.equal(other_drafts[0, :k], drafts[0, :k])
        assert torch.equal(other_confidence[0, : k + 1], confidence[0, : k + 1])
        if k + 1 < gamma:
            assert (other_confidence[0, k + 1] - confidence[0, k + 1]).abs() > 1e-4
        assert torch.equal(other_drafts[1], drafts[1]) and torch.equal(other_confidence[1], confidence[1])


def test_noise_is_ignored_at_temperature_zero(checkpoint):
    drafter = load_drafter(checkpoint("one-stage"), 1, 24)
    arguments = torch.tensor([7]), torch.tensor([0]), torch.tensor([0]), Warp(torch.zeros(1))
    blocks = [drafter.draft(*arguments, random_noise(1, 5, seed=seed)) for seed in range(2)]
    for first, second in zip(*blocks):
        assert torch.equal(first, second)


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_expected_calibration_error_by_hand():
    predicted = torch.tensor([0.8, 0.2, 0.8, 0.2, 0.2, 0.8, 0.2, 0.8])
    happened = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1]).bool()  # half of the 0.2s, three quarters of the 0.8s
    assert expected_calibration_error(predicted, happened, num_bins=2) == pytest.approx((0.3 + 0.05) / 2)
    assert expected_calibration_error(predicted, happened, num_bins=1) == pytest.approx(0.125)


def test_calibration_features_by_hand():
    """A draft distribution of 3/4, 1/8, 1/8 and a head that says 2; nothing else of the draft matters."""
    logits = torch.tensor([0.75, 0.125, 0.125]).log() + 5
    entropy, odds = 0.75 * math.log(4 / 3) + 0.25 * math.log(8), math.log(3)
    one, head, x, y = 1, 2.0, entropy, odds
    expected = [one, head, x, y, head * head, head * x, head * y, x * x, x * y, y * y]
    torch.testing.assert_close(calibration_features(torch.tensor(2.0), logits), torch.tensor(expected))
    certain = calibration_features(torch.tensor(2.0), torch.tensor([200.0, 0.0, 0.0]))
    assert certain.isfinite().all() and certain[2] == 0


def some_features(N, generator):
    logits = torch.randn(N, 4, 6, generator=generator) * 3
    return calibration_features(torch.randn(N, 4, generator=generator) * 1.5, logits)


def test_fit_calibration_finds_what_acceptance_depends_on():
    """Judged on a half that the fit has not seen: calibrated, and it ranks as well as the truth does."""
    generator, N, half = torch.Generator().manual_seed(0), 40_000, 20_000
    features = some_features(N, generator)
    truth = torch.randn(4, 10, generator=generator) * torch.tensor([1, 1, 1, 0.5] + 6 * [0.05])
    truth[:, 0] += 3  # so that many blocks reach the last position
    probability = (features * truth).sum(-1).sigmoid()
    survived = (torch.rand(N, 4, generator=generator) < probability).cumprod(1).bool()
    fitted = torch.tensor(fit_calibration(features[:half], survived[:half]))
    assert fitted.shape == truth.shape
    confidence = (features * fitted).sum(-1).sigmoid()[half:]
    for k in range(4):
        reached = survived[half:, k - 1] if k else torch.ones(half).bool()
        happened = survived[half:, k]
        assert expected_calibration_error(confidence.cumprod(1)[:, k], happened) < 0.02
        found, best = (area_under_curve(c[reached, k], happened[reached]) for c in (confidence, probability[half:]))
        assert found > best - 0.01


def test_calibration_of_the_nearest_temperature_is_applied(tmp_path):
    directory, gamma = write_checkpoint(tmp_path, "one-stage"), 7
    temperature, slot = torch.tensor([0.0, 0.3, 0.6, 1.0, 2.5]), torch.arange(5)
    nearest = [0, 0, 1, 1, 1]
    fitted = (0.3 * torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(0))).tolist()  # shorter than gamma
    taps, position, noise = random_taps(directory, 5), torch.tensor([0, 5, 10, 15, 12]), random_noise(5, gamma)
    features = []

    def draft():
        drafter = load_drafter(directory, 5, 24)
        drafter.calibration.register_forward_hook(
            lambda _, inputs, out: features.append(calibration_features(*inputs[:2]))
        )
        for r in range(5):
            drafter.store(taps[r, :16], torch.full((16,), r), torch.arange(16))
        return drafter.draft(slot + 3, slot, position, Warp(temperature), noise)

    plain_drafts, plain_q, plain_confidence = draft()
    torch.testing.assert_close(features[0][..., 1].sigmoid(), plain_confidence)
    calibration = {"confidence_weights": {"1.0": fitted[1], "0.0": fitted[0]}}
    (directory / "calibration.json").write_text(json.dumps(calibration))
    drafts, q, confidence = draft()
    assert torch.equal(drafts, plain_drafts) and torch.equal(q, plain_q)
    for r, k in itertools.product(range(5), range(gamma)):
        row = torch.tensor(fitted[nearest[r]][min(k, 3)])  # the last one holds from there on
        torch.testing.assert_close(confidence[r, k], (features[1][r, k] @ row).sigmoid(), atol=1e-5, rtol=0)
