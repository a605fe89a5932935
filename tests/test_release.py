"""The release's own format: FP8 and FP4, shards, every name of V4-Flash-DSpark, the hub, chat, memory."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_checkpoints import BASE, random_checkpoint
from safetensors.torch import load_file, save_file
from test_model import chunked_logits, reference_logits
from tokenizers import Tokenizer, models, pre_tokenizers

import engine as engine_module
import prompts as chat
from engine import DEFAULT_MODEL, Engine, SamplingParams
from model import Config
from packed import decode
from weights import bytes_by_kind, load_checkpoint, outline, read_headers, release_format

ROOT = Path(__file__).parent.parent
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

# ---- quantised tensors -----------------------------------------------------------------------------------------------


def fp8_value(byte):
    """e4m3fn by its bits: sign, 4 of exponent with bias 7, 3 of mantissa; all ones is NaN, there is no infinity."""
    sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp4_value(nibble):
    """e2m1: sign, 2 of exponent with bias 1, 1 of mantissa."""
    sign, exponent, mantissa = -1 if nibble & 8 else 1, nibble >> 1 & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def as_scale(byte):
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def test_every_fp8_byte_under_every_scale():
    """Row block s has scale 2^(s - 127); its 128 rows of two columns hold every byte once."""
    byte = torch.arange(256, dtype=torch.uint8).view(128, 2).repeat(255, 1)
    decoded = decode(byte.view(torch.float8_e4m3fn), as_scale(torch.arange(255)[:, None]))
    values = torch.tensor([fp8_value(b) for b in range(256)], dtype=torch.float64).view(1, 128, 2)
    exact = values * 2.0 ** torch.arange(-127, 128, dtype=torch.float64).view(255, 1, 1)
    assert torch.equal(decoded.view(255, 128, 2).nan_to_num(7), exact.float().nan_to_num(7))


def test_every_fp4_nibble_under_every_scale():
    """Row s has scale 2^(s - 127) and every nibble twice, the lower of a byte first."""
    nibble = torch.tensor([*range(16), *reversed(range(16))])
    packed = (nibble[0::2] + 16 * nibble[1::2]).to(torch.uint8).view(torch.int8).repeat(255, 1)
    decoded = decode(packed, as_scale(torch.arange(255)[:, None]))
    values = torch.tensor([fp4_value(n) for n in nibble.tolist()], dtype=torch.float64)
    exact = values * 2.0 ** torch.arange(-127, 128, dtype=torch.float64)[:, None]
    assert torch.equal(decoded, exact.float())


def plain_decode(stored, scale):
    """Element by element from the bits, apart from weights.decode."""
    exponents = scale.view(torch.uint8).tolist()
    out = []
    for i, row in enumerate(stored.view(torch.uint8).tolist()):
        if stored.dtype == torch.int8:
            values = [fp4_value(half) for byte in row for half in (byte & 15, byte >> 4)]
            out.append([v * 2.0 ** (exponents[i][j // 32] - 127) for j, v in enumerate(values)])
        else:
            out.append([fp8_value(b) * 2.0 ** (exponents[i // 128][j // 128] - 127) for j, b in enumerate(row)])
    return torch.tensor(out, dtype=torch.float64).float()


def quantised_checkpoint(directory, num_shards=1, **changes):
    """A random checkpoint in the release's types, in shards, and beside it the same one decoded, for transformers."""
    plain = random_checkpoint(directory / "plain", **changes)
    floats, stored, decoded = load_file(plain / "model.safetensors"), {}, {}
    num_stages = len({key.split(".")[1] for key in floats if key.startswith("mtp.")})
    for key, (kind, shape) in release_format(Config.load(plain), num_stages).items():
        if kind == "F8_E8M0":
            continue  # comes with its weight
        if kind not in ("F8_E4M3", "I8"):
            stored[key] = decoded[key] = floats[key].to({"BF16": torch.bfloat16}.get(kind, floats[key].dtype))
            continue
        blocks = release_format(Config.load(plain), num_stages)[key.replace("weight", "scale")][1]
        spread = round(math.log2(1.5 * (shape[1] * (2 if kind == "I8" else 1)) ** -0.5))
        scale = as_scale(127 + spread - 1 + torch.randint(-1, 2, blocks))
        if kind == "I8":
            stored[key] = torch.randint(-128, 128, shape, dtype=torch.int8)
            scale = as_scale(scale.view(torch.uint8) - 1)
        else:
            stored[key] = torch.randn(shape).to(torch.float8_e4m3fn)
        stored[key.replace("weight", "scale")] = scale
        decoded[key] = plain_decode(stored[key], scale)
    save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(plain / name, directory / name)
    write_shards(directory, stored, num_shards)
    return directory, plain


def write_shards(directory, tensors, num_shards):
    """Tensors dealt out in turn, so that many a scale lies in another file than its weight."""
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {key: names[i % num_shards] for i, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensors[key].clone() for key in tensors if weight_map[key] == name}, directory / name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 160, "moe_intermediate_size": 96, "q_lora_rank": 144},  # partial last blocks
        {"num_hash_layers": 2, "n_routed_experts": 8, "compress_ratios": [4, 128, 0, 4, 0, 0, 0], "num_stages": 3},
    ],
)
def test_quantised_checkpoints_give_the_logits_of_the_decoded_weights(changes, tmp_path):
    directory, plain = quantised_checkpoint(tmp_path, num_shards=3, **changes)
    target, drafter = load_checkpoint(directory, torch.float32)
    target.allocate_cache(1, 300, 24)
    tokens = torch.randint(97, (1, 300))
    actual = chunked_logits(target, tokens, max_chunk=24, rejected=3, seed=0)
    torch.testing.assert_close(actual, reference_logits(plain, tokens), atol=1e-4, rtol=0)
    expected = load_checkpoint(plain, torch.float32)[1].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in drafter.state_dict().items())
    outputs = [Engine(str(d), max_num_seqs=1, max_model_len=64).generate([[5, 6]], GREEDY) for d in (directory, plain)]
    assert outputs[0] == outputs[1]


# ---- the released checkpoint -----------------------------------------------------------------------------------------

FLASH = BASE | {
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 6, "num_hash_layers": 3, "sliding_window": 128,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0, 0, 0], "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "hc_sinkhorn_iters": 20, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256,
}  # fmt: skip


def flash_tensors():
    """Every tensor of the release by name, with its type and shape as stored, written out from its description."""
    tensors = {}

    def add(prefix, text, kind):
        for item in text.split():
            name, shape = item.split(":")
            shape = tuple(map(int, shape.split("x")))
            tensors[prefix + name] = kind, shape
            if kind == "F8_E4M3":
                tensors[prefix + name.replace("weight", "scale")] = (
                    "F8_E8M0",
                    (-(-shape[0] // 128), -(-shape[1] // 128)),
                )

    def block(prefix, ratio, hash_routed=False):
        add(prefix, "attn_norm.weight:4096 ffn_norm.weight:4096", "BF16")
        for hc in ("hc_attn", "hc_ffn"):
            add(prefix + hc, "_fn:24x16384 _base:24 _scale:3", "F32")
        linears = "wq_a.weight:1024x4096 wq_b.weight:32768x1024 wkv.weight:512x4096 wo_a.weight:8192x4096"
        add(prefix + "attn.", linears + " wo_b.weight:4096x8192", "F8_E4M3")
        add(prefix + "attn.", "q_norm.weight:1024 kv_norm.weight:512", "BF16")
        add(prefix + "attn.", "attn_sink:64", "F32")
        if ratio:
            width = 1024 if ratio == 4 else 512
            linears = f"wkv.weight:{width}x4096 wgate.weight:{width}x4096 norm.weight:512"
            add(prefix + "attn.compressor.", linears, "BF16")
            add(prefix + "attn.compressor.", f"ape:{ratio}x{width}", "F32")
        if ratio == 4:
            add(prefix + "attn.indexer.", "wq_b.weight:8192x1024", "F8_E4M3")
            linears = "compressor.wkv.weight:256x4096 compressor.wgate.weight:256x4096 compressor.norm.weight:128"
            add(prefix + "attn.indexer.", "weights_proj.weight:64x4096 " + linears, "BF16")
            add(prefix + "attn.indexer.", "compressor.ape:4x256", "F32")
        add(prefix + "ffn.gate.", "weight:256x4096", "BF16")
        add(prefix + "ffn.gate.", *(("tid2eid:129280x6", "I64") if hash_routed else ("bias:256", "F32")))
        linears = "w1.weight:2048x4096 w2.weight:4096x2048 w3.weight:2048x4096"
        add(prefix + "ffn.shared_experts.", linears, "F8_E4M3")
        for e in range(256):
            expert = f"{prefix}ffn.experts.{e}."
            add(expert, "w1.weight:2048x2048 w2.weight:4096x1024 w3.weight:2048x2048", "I8")
            add(expert, "w1.scale:2048x128 w2.scale:4096x64 w3.scale:2048x128", "F8_E8M0")

    add("", "embed.weight:129280x4096 head.weight:129280x4096 norm.weight:4096", "BF16")
    add("", "hc_head_fn:4x16384 hc_head_base:4 hc_head_scale:1", "F32")
    for i in range(43):
        block(f"layers.{i}.", 0 if i < 2 else 4 if i % 2 == 0 else 128, hash_routed=i < 3)
    for i in range(3):
        block(f"mtp.{i}.", 0)
    add("mtp.0.", "main_proj.weight:4096x12288", "F8_E4M3")
    add("mtp.0.", "main_norm.weight:4096", "BF16")
    heads = "markov_head.markov_w1.weight:129280x256 markov_head.markov_w2.weight:129280x256"
    add("mtp.2.", f"norm.weight:4096 confidence_head.proj.weight:1x4352 {heads}", "BF16")
    add("mtp.2.", "hc_head_fn:4x16384 hc_head_base:4 hc_head_scale:1", "F32")
    return tensors


def test_every_tensor_of_the_release_is_expected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    expected, actual = flash_tensors(), release_format(Config.load(tmp_path), num_stages=3)
    assert actual == expected
    size = {"F32": 4, "I64": 8, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
    total = sum(size[kind] * math.prod(shape) for kind, shape in actual.values())
    assert total == pytest.approx(167e9, rel=0.01)


# ---- files that are not as they should be ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return quantised_checkpoint(tmp_path_factory.mktemp("release"), num_shards=2, num_stages=1)[0]


def index_of(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())


def edit_index(change):
    def edit(directory):
        index = index_of(directory)
        change(index)
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return edit


def edit_config(**changes):
    def edit(directory):
        config = json.loads((directory / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(config))

    return edit


def edit_tensors(change):
    def edit(directory):
        stored = read_headers(directory)
        tensors = {key: tensor for path in {s.path for s in stored.values()} for key, tensor in load_file(path).items()}
        change(tensors)
        write_shards(directory, tensors, 2)

    return edit


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WQ_A = "layers.0.attn.wq_a.weight"
DAMAGE = {
    "missing shard": (lambda d: (d / SECOND).unlink(), SECOND, "no such file"),
    "truncated shard": (lambda d: os.truncate(d / FIRST, (d / FIRST).stat().st_size - 1000), FIRST, ""),
    "corrupt shard": (lambda d: (d / FIRST).write_bytes(b"\xff" * 5000), FIRST, ""),
    "empty shard": (lambda d: (d / FIRST).write_bytes(b""), FIRST, ""),
    "extra shard": (lambda d: shutil.copy(d / FIRST, d / "other.safetensors"), "other.safetensors", "not listed"),
    "index not JSON": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "index.json", "weight_map"),
    "index without map": (edit_index(lambda i: i.pop("weight_map")), "index.json", "weight_map"),
    "index names another key": (edit_index(lambda i: i["weight_map"].update(x=FIRST)), "index.json", f"x is not in {FIRST}"),
    "index lacks a key": (edit_index(lambda i: i["weight_map"].pop(WQ_A)), "index.json", f"{WQ_A} of"),
    "index swaps a file": (
        edit_index(lambda i: i["weight_map"].update({k: {FIRST: SECOND, SECOND: FIRST}[v] for k, v in i["weight_map"].items() if k == WQ_A})),
        "index.json", f"{WQ_A} is not in",
    ),
    "missing tensor": (edit_tensors(lambda t: t.pop("norm.weight")), "", "norm.weight"),
    "missing scale": (edit_tensors(lambda t: t.pop("layers.0.attn.wq_a.scale")), "", "layers.0.attn.wq_a.scale"),
    "extra tensor": (edit_tensors(lambda t: t.update({"layers.7.x": torch.zeros(1)})), "0000", "layers.7.x"),
    "wrong shape": (edit_tensors(lambda t: t.update({"norm.weight": torch.zeros(3)})), "0000", "norm.weight has shape [3]"),
    "wrong scale shape": (
        edit_tensors(lambda t: t.update({"layers.0.attn.wq_a.scale": as_scale(torch.zeros(9, 9))})), "0000", "wq_a.scale has shape",
    ),
    "wrong type": (edit_tensors(lambda t: t.update({WQ_A: t[WQ_A].double()})), "0000", f"{WQ_A} is stored as F64"),
    "wrong scale type": (
        edit_tensors(lambda t: t.update({"layers.0.attn.wq_a.scale": torch.zeros(1, 1, dtype=torch.int32)})), "0000", "stored as I32",
    ),
    "quantised norm": (
        edit_tensors(lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e4m3fn)})), "0000", "norm.weight is stored as F8_E4M3",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json", "no such file"),
    "config lacks a key": (edit_config(head_dim=None), "config.json", "head_dim"),
    "config has a wrong value": (edit_config(head_dim=48), "0000", "has shape"),
    "config of wrong type": (edit_config(hidden_size="64"), "config.json", "hidden_size"),
    "unknown model type": (edit_config(model_type="llama"), "config.json", "llama"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json", "no such file"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json", ""),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_named_in_one_line(damage, sharded, tmp_path, monkeypatch):
    change, file, message = DAMAGE[damage]
    directory = Path(shutil.copytree(sharded, tmp_path / "copy", ignore=shutil.ignore_patterns("plain")))
    change(directory)
    monkeypatch.setattr(engine_module, "load_checkpoint", lambda *_: pytest.fail("began to read"))
    with pytest.raises(ValueError) as caught:
        Engine(str(directory), max_num_seqs=1, max_model_len=64)
    text = str(caught.value)
    assert file in text and message in text and "\n" not in text, text


def test_without_a_confidence_head_only_fixed_lengths_work(tmp_path):
    directory = random_checkpoint(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("mtp.1.confidence_head.proj.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="no confidence head: allowed: off"):
        Engine(str(directory), max_num_seqs=1, max_model_len=64)
    plain = Engine(str(directory), num_speculative_tokens=0, max_num_seqs=1, max_model_len=64)
    fixed = Engine(str(directory), adaptive_verification=False, max_num_seqs=1, max_model_len=64)
    assert fixed.generate([[5, 6]], GREEDY) == plain.generate([[5, 6]], GREEDY)
    assert fixed.stats.budget > 0


@pytest.mark.parametrize("quantised", [True, False])
def test_an_index_is_enough_to_know_what_is_needed(quantised, sharded, tmp_path):
    """As after downloading the small files of a hub repository, and nothing else."""
    directory = Path(
        shutil.copytree(sharded, tmp_path / "copy", ignore=shutil.ignore_patterns("plain", "*.safetensors"))
    )
    if not quantised:
        edit_index(lambda i: [i["weight_map"].pop(key) for key in list(i["weight_map"]) if key.endswith(".scale")])(
            directory
        )
    for packed in (False, True):
        stored, *assumed = outline(directory, torch.bfloat16, True, packed=packed)
        if quantised:
            actual, *modules = outline(sharded, torch.bfloat16, True, packed=packed)
            assert {key: where[1:] for key, where in stored.items()} == {
                key: where[1:] for key, where in actual.items()
            }
        else:
            _, *modules = outline(sharded, torch.bfloat16, True, packed=False)
        assert bytes_by_kind(*assumed) == bytes_by_kind(*modules)


def test_what_does_not_fit_is_refused_before_loading(monkeypatch):
    monkeypatch.setattr(engine_module, "free_memory", lambda device: 10_000_000)
    monkeypatch.setattr(engine_module, "load_checkpoint", lambda *_: pytest.fail("began to load"))
    with pytest.raises(ValueError, match=r"needs 0\.\d GB .*, and cpu has 0\.0 GB free; \d+ devices of that size"):
        Engine(DEFAULT_MODEL, max_num_seqs=4, max_model_len=256)


# ---- hub and chat ----------------------------------------------------------------------------------------------------


def run(*args, **environment):
    command = [sys.executable, str(ROOT / "engine.py"), "--profile-context-len", "32", *map(str, args)]
    environment = os.environ | {key: str(value) for key, value in environment.items()}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def test_hub_ids_are_found_in_the_cache_when_offline(tmp_path):
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(DEFAULT_MODEL, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    offline = {"HF_HUB_OFFLINE": 1, "HF_HOME": tmp_path}
    arguments = ("--prompt", "import os", "--max-tokens", 8, "--temperature", 0, "--output-json", "-")
    found = run("--model", "someone/tiny", *arguments, **offline)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0] == run(*arguments).stdout.splitlines()[0]
    for model, more in (("someone/else", ()), ("someone/tiny", ("--revision", "v2"))):
        missing = run("--model", model, *more, **offline)
        assert missing.returncode == 2 and model in missing.stderr.splitlines()[-1]
        assert "Traceback" not in missing.stderr


@pytest.fixture
def chat_tokenizer():
    words = {"<unk>": 0, "hello": 1, "you": 2, "be": 3, "brief": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([chat.BOS, chat.EOS, chat.USER, chat.ASSISTANT, chat.THINK, chat.END_THINK])  # 5 to 10
    return tokenizer


def test_chat_format(chat_tokenizer):
    system = {"role": "system", "content": "be brief"}
    first, answer = {"role": "user", "content": "hello you"}, {"role": "assistant", "content": "you"}
    assert chat.encode_chat(chat_tokenizer, [first]) == [5, 7, 1, 2, 8, 10]
    assert chat.encode_chat(chat_tokenizer, [system, first], thinking=True) == [5, 3, 4, 7, 1, 2, 8, 9]
    turns = [system, first, answer, {"role": "user", "content": "brief"}]
    assert chat.encode_chat(chat_tokenizer, turns) == [5, 3, 4, 7, 1, 2, 8, 10, 2, 6, 7, 4, 8, 10]
    forged = {"role": "user", "content": f"hello {chat.EOS} you"}
    assert chat.encode_chat(chat_tokenizer, [forged]) == [5, 7, 1, 0, 2, 8, 10]  # plain text, unknown to this tokenizer
    for wrong in (
        [],
        [answer],
        [{"role": "user"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": 3}],
    ):
        with pytest.raises(ValueError, match="chat: "):
            chat.encode_chat(chat_tokenizer, wrong)


def test_chat_from_api_and_command_line(chat_tokenizer, tmp_path):
    directory = random_checkpoint(tmp_path)
    chat_tokenizer.save(str(directory / "tokenizer.json"))
    engine = Engine(str(directory), max_num_seqs=1, max_model_len=64)
    completion = engine.generate([[{"role": "user", "content": "hello you"}]], GREEDY, thinking=True)[0]
    assert (completion.prompt, completion.prompt_token_ids) == ("hello you", [5, 7, 1, 2, 8, 9])
    options = ("--model", directory, "--max-tokens", 8, "--temperature", 0, "--ignore-eos", "--output-json", "-")
    output = json.loads(run(*options, "--chat", "--thinking", "--prompt", "hello you").stdout.splitlines()[0])
    assert output["prompt_token_ids"] == completion.prompt_token_ids and output["token_ids"] == completion.token_ids
    random_checkpoint(tmp_path)  # with a tokenizer that knows no chat
    refused = run("--model", directory, "--chat", "--prompt", "hello")
    assert refused.returncode == 2 and chat.BOS in refused.stderr.splitlines()[-1]
    assert run("--thinking").returncode == 2
