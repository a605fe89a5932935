"""What daily use does to a program: bad input, interruption, full disks, broken weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from random_checkpoints import random_checkpoint

from cli import main
from engine import DEFAULT_MODEL, Engine, SamplingParams
from profile_costs import CostTable

ROOT = Path(__file__).parent.parent
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A place with good and bad files by name; {name} in the table below is the path of one."""
    root = tmp_path_factory.mktemp("files")
    meta = {"device": "cpu", "dtype": "float32", "model": DEFAULT_MODEL, "mode": "eager", "context_len": 32}
    CostTable(meta, [(1, 1.5), (8, 3.0)], [(1, 10.0), (48, 30.0)]).save(root / "table")
    good = json.loads((root / "table").read_text())
    for name, change in {
        "flat": {"verify_cost_ms": [[1, 10.0], [48, 10.0]]},
        "negative": {"verify_cost_ms": [[1, -1.0], [48, 10.0]]},
        "no-costs": {"verify_cost_ms": []},
        "falling": {"verify_cost_ms": [[48, 10.0], [1, 9.0]]},
        "elsewhere": {"meta": meta | {"device": "cuda"}},
        "other-dtype": {"meta": meta | {"dtype": "bfloat16"}},
        "staircase": {"padded": True},
    }.items():
        (root / name).write_text(json.dumps(good | change))
    for name, content in {
        "empty": b"",
        "not-json": b"{",
        "a-list": b"[]",
        "not-utf8": b"caf\xe9\n",
        "bad-line": b'import os\n{"prompt": "a"}\n{"prompt": 3}\n',
        "cut-line": b'import os\n{"prompt": "a\n',
        "no-such-token": b'{"prompt_token_ids": [0, 5000]}\n',
        "no-token": b'{"prompt_token_ids": []}\n',
        "float-token": b'{"prompt_token_ids": [1.5]}\n',
        "long-prompt": b'{"prompt_token_ids": [' + b"5, " * 2000 + b"5]}\n",
    }.items():
        (root / name).write_bytes(content)
    (root / "directory").mkdir()
    tiny = Path(DEFAULT_MODEL)
    for name, without in (
        ("no-config", "config.json"),
        ("no-weights", "model.safetensors"),
        ("no-tokenizer", "tokenizer.json"),
    ):
        (root / name).mkdir()
        for file in {"config.json", "model.safetensors", "tokenizer.json"} - {without}:
            (root / name / file).symlink_to(tiny / file)
    config = json.loads((tiny / "config.json").read_text())
    for name, text in {
        "config-not-json": "{",
        "config-a-list": "[]",
        "other-type": json.dumps(config | {"model_type": "llama"}),
        "no-width": json.dumps({key: value for key, value in config.items() if key != "hidden_size"}),
        "text-width": json.dumps(config | {"hidden_size": "192"}),
        "other-width": json.dumps(config | {"hidden_size": 160}),
        "negative-layers": json.dumps(config | {"num_hidden_layers": -1}),
        "odd-rope": json.dumps(config | {"qk_rope_head_dim": 7}),
        "wrong-taps": json.dumps(config | {"dspark_target_layer_ids": [99]}),
        "wrong-ratios": json.dumps(config | {"compress_ratios": [0, 5]}),
        "nan-eps": json.dumps(config | {"rms_norm_eps": float("nan")}),
        "few-experts": json.dumps(config | {"num_experts_per_tok": 9}),
    }.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(text)
        for file in ("model.safetensors", "tokenizer.json"):
            (root / name / file).symlink_to(tiny / file)
    calibration = json.loads((tiny / "calibration.json").read_text())["confidence_weights"]
    for name, content in {
        "calibration-not-json": "{",
        "calibration-a-list": "[]",
        "calibration-empty": json.dumps({"confidence_weights": {}}),
        "calibration-narrow": json.dumps({"confidence_weights": {"1.0": [row[:9] for row in calibration["1.0"]]}}),
        "calibration-nan": json.dumps({"confidence_weights": {"1.0": [[float("nan")] * 10]}}),
    }.items():
        (root / name).mkdir()
        (root / name / "calibration.json").write_text(content)
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (root / name / file).symlink_to(tiny / file)
    return root


BAD = [  # options, and what the message must name
    ("--model {files}/nowhere", "{files}/nowhere"),
    ("--model {files}/table", "{files}/table"),
    ("--model {files}/directory", "config.json"),
    ("--model {files}/no-config", "no-config/config.json"),
    ("--model {files}/no-weights", "no-weights/model.safetensors"),
    ("--model {files}/no-tokenizer", "no-tokenizer/tokenizer.json"),
    ("--model {files}/config-not-json", "config-not-json/config.json"),
    ("--model {files}/config-a-list", "config-a-list/config.json"),
    ("--model {files}/other-type", "'llama'"),
    ("--model {files}/no-width", "hidden_size"),
    ("--model {files}/text-width", "hidden_size is '192'"),
    ("--model {files}/other-width", "has shape"),
    ("--model {files}/negative-layers", "num_hidden_layers is -1"),
    ("--model {files}/odd-rope", "qk_rope_head_dim is 7"),
    ("--model {files}/wrong-taps", "dspark_target_layer_ids is [99]"),
    ("--model {files}/wrong-ratios", "compress_ratios"),
    ("--model {files}/nan-eps", "rms_norm_eps is nan"),
    ("--model {files}/few-experts", "num_experts_per_tok"),
    ("--model {files}/calibration-not-json", "calibration-not-json/calibration.json"),
    ("--model {files}/calibration-a-list", "calibration-a-list/calibration.json"),
    ("--model {files}/calibration-empty", "calibration-empty/calibration.json"),
    ("--model {files}/calibration-narrow", "shape [1, 5, 9]"),
    ("--model {files}/calibration-nan", "calibration-nan/calibration.json"),
    ("--temperature -1", "temperature is -1"),
    ("--temperature nan", "temperature is nan"),
    ("--temperature inf", "temperature is inf"),
    ("--temperature warm", "warm"),
    ("--top-k -1", "top_k is -1"),
    ("--top-k 99999999999", "top_k is 99999999999"),
    ("--top-k 1.5", "1.5"),
    ("--top-p 0", "top_p is 0"),
    ("--top-p 1.1", "top_p is 1.1"),
    ("--top-p nan", "top_p is nan"),
    ("--seed -1", "seed is -1"),
    ("--seed 9223372036854775808", "seed is 9223372036854775808"),
    ("--max-tokens 0", "max_tokens is 0"),
    ("--max-tokens -5", "max_tokens is -5"),
    ("--max-tokens many", "many"),
    ("--logprobs -1", "logprobs is -1"),
    ("--logprobs 101", "logprobs is 101"),
    ("--num-speculative-tokens -2", "num_speculative_tokens is -2"),
    ("--num-speculative-tokens 65", "num_speculative_tokens is 65"),
    ("--max-num-seqs 0", "--max-num-seqs 0"),
    ("--max-num-seqs -3", "--max-num-seqs -3"),
    ("--max-num-seqs 8 --max-num-batched-tokens 4", "--max-num-batched-tokens (4)"),
    ("--max-num-batched-tokens 0", "--max-num-batched-tokens (0)"),
    ("--max-model-len 1", "max_model_len is 1"),
    ("--max-model-len -1", "max_model_len is -1"),
    ("--max-model-len 4000000", "max_model_len is 4000000"),
    ("--profile-context-len -1", "profile_context_len is -1"),
    ("--device tpu", "tpu"),
    ("--dtype int8", "int8"),
    ("--budget-rule best", "best"),
    ("--draft-sample-method loud", "loud"),
    ("--acceptance always", "always"),
    ("--thinking", "--thinking"),
    ("--unknown", "--unknown"),
    ("--prompt", "--prompt"),
    ("--prompts-file {files}/nowhere", "{files}/nowhere"),
    ("--prompts-file {files}/directory", "{files}/directory"),
    ("--prompts-file {files}/empty", "no prompts"),
    ("--prompts-file {files}/not-utf8", "utf-8"),
    ("--prompts-file {files}/bad-line", "line 3"),
    ("--prompts-file {files}/cut-line", "line 2"),
    ("--prompts-file {files}/no-such-token", "token id 5000"),
    ("--prompts-file {files}/no-token", "no tokens"),
    ("--prompts-file {files}/float-token", "token id 1.5"),
    ("--prompts-file {files}/long-prompt", "has 2001 tokens"),
    ("--max-model-len 16 --prompt a-prompt-that-is-longer-than-sixteen-tokens-I-should-think", "max_model_len 16"),
    ("--output-json {files}/directory", "{files}/directory"),
    ("--output-json {files}/nowhere/file", "{files}/nowhere/file"),
    ("--trace {files}/nowhere/file", "{files}/nowhere/file"),
    ("--trace {files}/directory", "{files}/directory"),
    ("--cost-table {files}/nowhere", "{files}/nowhere"),
    ("--cost-table {files}/not-json", "{files}/not-json"),
    ("--cost-table {files}/a-list", "{files}/a-list"),
    ("--cost-table {files}/flat", "flat"),
    ("--cost-table {files}/negative", "positive"),
    ("--cost-table {files}/no-costs", "no verify costs"),
    ("--cost-table {files}/falling", "must rise"),
    ("--cost-table {files}/elsewhere", "device 'cuda'"),
    ("--cost-table {files}/other-dtype", "dtype 'bfloat16'"),
    ("--cost-table {files}/staircase", "padded"),
]
if not torch.cuda.is_available():
    BAD.append(("--device cuda", "device is cuda"))


@pytest.mark.parametrize(("options", "culprit"), BAD)
def test_bad_input_is_one_line_and_exit_status_2(options, culprit, files, capsys):
    try:
        status = main(["--profile-context-len", "32", *options.format(files=files).split()])
    except SystemExit as stopped:  # argparse
        status = stopped.code
    output = capsys.readouterr()
    *before, message = output.err.splitlines()
    assert (status, output.out) == (2, "")
    assert message.startswith("engine.py: ") and culprit.format(files=files) in message
    assert not any(line.startswith(("engine.py", "Traceback")) for line in before)


def command(*args):
    return [sys.executable, str(ROOT / "engine.py"), "--profile-context-len", "32", *map(str, args)]


def run(*args, **options):
    return subprocess.run(command(*args), text=True, timeout=300, check=False, stderr=subprocess.PIPE, **options)


def test_a_prompt_that_is_too_long_does_not_stop_the_others(files, tmp_path):
    output = tmp_path / "output"
    prompts = tmp_path / "prompts"
    prompts.write_text('import os\n{"prompt_token_ids": [' + "5, " * 60 + "5]}\n\nclass A:\n")
    options = (
        "--prompts-file",
        prompts,
        "--max-tokens",
        8,
        "--ignore-eos",
        "--no-adaptive-verification",
        "--cost-table",
        files / "table",
    )
    result = run(*options, "--max-model-len", 60, "--output-json", output)
    assert result.returncode == 2 and "prompt 1 has 61 tokens" in result.stderr
    refused = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r.get("index") for r in refused] == [0, 2, 3, None]
    assert refused[1]["prompt"] == "" and len(refused[1]["prompt_token_ids"]) == 1  # an empty prompt is allowed
    assert run(*options, "--output-json", output).returncode == 0
    everything = [json.loads(line) for line in output.read_text().splitlines()]
    assert [everything[i]["token_ids"] for i in (0, 2, 3)] == [
        r["token_ids"] for r in refused[:3]
    ]  # same random numbers


@pytest.fixture
def interruptible():
    """Shells start background jobs with SIGINT ignored, which child processes would inherit: let them hear it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("several", [False, True])
def test_an_interrupted_run_shows_what_it_has(number, status, several, files, tmp_path):
    output, trace = tmp_path / "output", tmp_path / "trace"
    prompts = ("--prompt", "import os", "class A:") if several else ()
    options = (
        "--max-tokens",
        900,
        "--ignore-eos",
        "--cost-table",
        files / "table",
        "--output-json",
        output,
        "--trace",
        trace,
    )
    with subprocess.Popen(
        command(*prompts, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not (trace.exists() and trace.read_text().count("\n") > 5):
            time.sleep(0.05)
        process.send_signal(number)
        text, error = process.communicate(timeout=60)
    assert process.returncode == status, error
    assert "Traceback" not in error and "cut" in text
    *requests, last = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(requests) == 1 + several and last["stats"]["output_tokens"] > 0
    assert {r["finish_reason"] for r in requests} == {"cut"} and all(r["token_ids"] for r in requests)
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(len(r["emitted"]) for s in steps for r in s["requests"]) <= last["stats"]["output_tokens"]


@pytest.mark.usefixtures("interruptible")
def test_interrupted_before_the_first_step(files):
    with subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stderr.readline()  # what memory is needed: before the costs are profiled
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error


def test_killed_at_any_moment_only_complete_lines_are_there(files, tmp_path):
    for i in range(3):
        trace = tmp_path / f"trace{i}"
        options = "--prompt", *["import os"] * 16, "--max-tokens", 300, "--ignore-eos", "--trace", trace
        with subprocess.Popen(command(*options, "--cost-table", files / "table"), stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not (trace.exists() and trace.read_text().count("\n") > 3 + 2 * i):
                time.sleep(0.01)
            process.kill()
        text = trace.read_text()
        assert text.endswith("\n") and all("requests" in json.loads(line) for line in text.splitlines())


def test_a_full_disk_and_a_closed_pipe_are_said_in_one_line(files, tmp_path):
    options = "--max-tokens", 8, "--cost-table", files / "table"
    for file in ("--output-json", "--trace"):
        result = run(*options, file, "/dev/full", stdout=subprocess.DEVNULL)
        assert (
            result.returncode == 1 and result.stderr.splitlines()[-1] == "engine.py: /dev/full: No space left on device"
        )
    with open("/dev/full", "w") as full:
        result = run(*options, stdout=full)
    assert (
        result.returncode == 1
        and result.stderr.splitlines()[-1] == "engine.py: standard output: No space left on device"
    )
    reading, writing = os.pipe()
    os.close(reading)
    for more in ((), ("--output-json", "-")):
        result = run(*options, *more, stdout=writing)
        assert result.returncode == 1 and result.stderr.splitlines()[-1].endswith("Broken pipe"), result.stderr
        assert "Traceback" not in result.stderr and "Exception" not in result.stderr


def test_logits_that_are_not_finite_end_their_request_only(tmp_path):
    engine = Engine(str(random_checkpoint(tmp_path)), max_num_seqs=3, max_model_len=64)
    prompts = [[5, 6], [7, 8], [9]]
    fine = engine.generate(prompts, GREEDY)
    poisoned = engine.target.embed.weight[8].clone()
    engine.target.embed.weight[8] = torch.nan
    completions = engine.generate(prompts, GREEDY)
    assert completions[1].finish_reason == "error" and completions[1].token_ids == []
    assert completions[1].error.endswith("the target's logits are not finite")
    for i in (0, 2):  # unless they come across the poisoned token themselves
        assert completions[i] == fine[i] or completions[i].finish_reason == "error"
    engine.target.embed.weight[8] = poisoned
    assert engine.generate(prompts, GREEDY) == fine  # nothing of it is left in the caches


def test_an_exception_from_outside_leaves_the_engine_usable(tmp_path):
    engine = Engine(str(random_checkpoint(tmp_path)), max_num_seqs=2, max_model_len=64)
    fine = engine.generate([[5, 6]] * 3, GREEDY)

    def fail(record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate([[5, 6]] * 3, GREEDY, fail)
    assert {c.finish_reason for c in engine.completions()} == {"cut"}
    with pytest.raises(ValueError, match="prompt 1 has token id 5000"):
        engine.generate([[5], [5000]], GREEDY)
    assert engine.generate([[5, 6]] * 3, GREEDY) == fine
