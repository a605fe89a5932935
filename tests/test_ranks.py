"""Several processes with a share of the experts each: the same tokens as one, and no hang when something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import DEFAULT_MODEL
from profile_costs import CostTable

ROOT = Path(__file__).parent.parent
PROMPTS = ("--prompt", "import os\n", "class Stack:", "def main(", "for line in")


def command(processes, *args):
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return [sys.executable, *start, str(ROOT / "engine.py"), "--profile-context-len", "32", *map(str, args)]


def run(processes, *args):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(processes, *args), capture_output=True, text=True, timeout=300, env=environment, check=False
    )


def outputs(processes, *args):
    result = run(processes, *PROMPTS, "--max-tokens", 40, "--ignore-eos", "--output-json", "-", *args)
    assert result.returncode == 0, result.stderr
    *requests, last = [json.loads(line) for line in result.stdout.splitlines()]  # one process prints
    assert last["stats"]["mean_accepted_length"] > 1.1
    return [r["token_ids"] for r in requests]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    meta = {"device": "cpu", "dtype": "float32", "model": DEFAULT_MODEL, "mode": "eager", "context_len": 32}
    path = tmp_path_factory.mktemp("costs") / "table.json"
    CostTable(meta, [(1, 1.5), (8, 3.0)], [(1, 10.0), (8, 11.0), (48, 30.0)]).save(path)
    return path


@pytest.mark.parametrize("temperature", [0, 1])
def test_two_processes_write_what_one_writes(temperature, table):
    options = "--temperature", temperature, "--cost-table", table
    assert outputs(2, *options) == outputs(1, *options)


def test_costs_that_every_process_measures_differently_do_no_harm():
    """Each measures its own times, and those of the first are used: with others they would part ways and wait forever."""
    options = "--acceptance", "coupled"  # the text is the same whatever the budgets
    assert outputs(2, *options) == outputs(1, *options)


def test_uneven_shares_are_refused():
    result = run(3, *PROMPTS)
    assert result.returncode != 0
    assert sum("3 processes are running, allowed: " in line for line in result.stderr.splitlines()) == 1


def test_a_process_that_dies_ends_the_others_within_seconds(tmp_path, table):
    trace = tmp_path / "trace"
    options = "--max-tokens", 900, "--ignore-eos", "--cost-table", table, "--trace", trace
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command(2, *options), stderr=subprocess.PIPE, text=True, env=environment) as launcher:
        while launcher.poll() is None and not (trace.exists() and trace.read_text()):
            time.sleep(0.2)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        workers = [pid for pid in children if "engine.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(workers) == 2
        os.kill(int(workers[1]), signal.SIGKILL)
        start = time.time()
        error = launcher.communicate(timeout=60)[1]
    assert launcher.returncode != 0 and time.time() - start < 30
    assert "SIGKILL" in error or "another process has gone" in error
