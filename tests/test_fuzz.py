"""Files that were damaged at random: an error that can be read, or work as usual; never another exception, never a hang."""

import json
from argparse import Namespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_checkpoints import BASE, random_checkpoint

from cli import read_prompts
from model import Config
from weights import outline

QUICK = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_stages=1)


def try_outline(directory):
    try:
        outline(directory, torch.float32, True)
    except ValueError as error:
        assert str(directory) in str(error) and "\n" not in str(error)


@QUICK
@given(
    changes=st.dictionaries(st.sampled_from(sorted(BASE)), JSON, min_size=1, max_size=3),
    drop=st.sampled_from([None, *BASE]),
)
def test_configs(changes, drop, checkpoint):
    config = {key: value for key, value in (BASE | changes).items() if key != drop}
    (checkpoint / "config.json").write_text(json.dumps(config))
    try_outline(checkpoint)


@QUICK
@given(text=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_configs_that_are_something_else(text, checkpoint):
    (checkpoint / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match="config.json"):
        Config.load(checkpoint)


@QUICK
@given(data=st.data())
def test_safetensors_headers(data, checkpoint, tmp_path):
    whole = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, 3000) | st.integers(0, 8))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))]
    (tmp_path / "model.safetensors").write_bytes(damaged)
    try_outline(tmp_path)


@QUICK
@given(
    lines=st.lists(st.binary(max_size=30) | JSON.map(lambda v: json.dumps(v).encode()) | st.just(b'{"prompt": "a"}'))
)
def test_prompts_files(lines, tmp_path):
    path = tmp_path / "prompts"
    path.write_bytes(b"\n".join(lines))
    try:
        prompts = read_prompts(Namespace(prompt=None, prompts_file=str(path), chat=False, thinking=False))
        assert prompts and all(isinstance(prompt, str | list) for prompt in prompts)
    except ValueError as error:
        assert str(path) in str(error)
