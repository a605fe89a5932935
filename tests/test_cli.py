"""The command line as others script against it: outputs, streams, exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*args, check=True):
    command = [sys.executable, str(ROOT / "engine.py"), "--profile-context-len", "32", *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", check=False)
    assert not check or result.returncode == 0, result.stderr
    return result


def test_quick_start_streams_text_and_says_how_it_went():
    result = run("--max-tokens", 24)
    assert result.stdout.startswith("def read_config(path):") and len(result.stdout) > 30
    for words in ("tokens/s", "mean accepted length", "mean budget per request", "acceptance by position", "step time"):
        assert words in result.stderr


def test_output_json_trace_and_prompts_file(tmp_path):
    prompts, trace = tmp_path / "prompts", tmp_path / "trace"
    prompts.write_text('import os\n{"prompt": "class A:"}\n{"prompt_token_ids": [0, 70, 71]}\n')
    options = ["--prompts-file", prompts, "--max-tokens", 12, "--temperature", 0, "--ignore-eos"]
    result = run(*options, "--output-json", "-", "--trace", trace)
    *requests, last = [json.loads(line) for line in result.stdout.splitlines()]  # nothing else on standard output
    assert [r["index"] for r in requests] == [0, 1, 2]
    assert [r["prompt"] for r in requests] == ["import os", "class A:", None]
    assert requests[2]["prompt_token_ids"] == [0, 70, 71]
    for r in requests:
        assert set(r) == {"index", "prompt", "prompt_token_ids", "text", "token_ids", "finish_reason"}
        assert len(r["token_ids"]) == 12 and r["finish_reason"] == "length"
    stats = last["stats"]
    assert stats["output_tokens"] == 36
    names = (
        "output_tokens wall_s tokens_per_s steps mean_accepted_length mean_budget_per_request acceptance_by_position"
    )
    assert set(names.split()) <= set(stats)
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(len(steps))) and len(steps) == stats["steps"]
    assert set(steps[0]) == {"step", "num_tokens", "budget", "predicted_ms", "measured_ms", "requests", "cost_ms"}
    fields = "index position anchor drafts confidence survival admitted accepted emitted"
    assert set(steps[0]["requests"][0]) == set(fields.split())
    emitted = [t for s in steps for r in s["requests"] if r["index"] == 1 for t in r["emitted"]]
    assert emitted == requests[1]["token_ids"]
    output = tmp_path / "output"
    run(*options, "--output-json", output, "--no-adaptive-verification", "--num-speculative-tokens", 3)
    assert [json.loads(line) for line in output.read_text().splitlines()][:3] == requests


def test_several_prompts_are_printed_whole():
    result = run("--prompt", "import os", "class A:", "--max-tokens", 8)
    assert "--- request 0" in result.stdout and "\nclass A:" in result.stdout


def test_a_page_to_step_through_a_trace(tmp_path):
    """All in one file; where there is a browser to try it in, it shows the step that the address asks for."""
    trace, html = tmp_path / "trace", tmp_path / "page.html"
    run("--prompt", "import os", "class A:", "--max-tokens", 12, "--ignore-eos", "--trace", trace)
    command = [sys.executable, str(ROOT / "trace_view.py"), str(trace), "-o", str(html)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    page, steps = html.read_text(), trace.read_text().splitlines()
    assert page.count('"measured_ms"') == len(steps) and "http" not in page and "src=" not in page
    if browser := shutil.which("chromium") or shutil.which("google-chrome"):
        options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [browser, *options.split(), profile, "--dump-dom", f"{html.as_uri()}#1"]
        shown = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
        assert f"step 1 of {len(steps) - 1}" in shown
        assert shown.count('class="draft') == sum(len(r["drafts"]) for r in json.loads(steps[1])["requests"]) > 0
