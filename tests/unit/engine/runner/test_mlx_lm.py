"""The contract with mlx-lm's non-public corners: this fails when they move."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.engine.runner import mlx_lm, model_loader
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from mlx_lm.utils import _tokenizer_defaults, load_tokenizer

from tests.fixtures.engine import load_at_once
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.vocabulary import TURN_END_ID, write_tokenizer


def test_the_private_functions_have_the_shape_we_call() -> None:
    assert list(inspect.signature(_tokenizer_defaults).parameters) == ["model_path"]


def tokenizer_folder(folder: Path, **config: object) -> Path:
    """Write a tokenizer with these extra entries in its configuration, and no model."""
    write_tokenizer(folder, context_token_limit=64, chat_template=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("eos_token_ids", [None, TURN_END_ID, [TURN_END_ID]])
def test_the_tokenizer_is_the_one_that_mlx_lm_reads(tmp_path: Path, eos_token_ids: object) -> None:
    folder = tokenizer_folder(tmp_path)
    ours = mlx_lm.read_tokenizer(folder, eos_token_ids=eos_token_ids, trust_remote_code=False)
    theirs = load_tokenizer(folder, eos_token_ids=eos_token_ids)
    assert ours.eos_token_ids == theirs.eos_token_ids
    turns = [{"role": "user", "content": "the café 🧊"}]
    chats = [t.apply_chat_template(turns, add_generation_prompt=True) for t in (ours, theirs)]
    assert chats[0] == chats[1] and ours.has_chat_template
    assert ours.decode(ours.encode("the café 🧊")) == theirs.decode(theirs.encode("the café 🧊"))


@pytest.mark.parametrize("is_memory_wired", [False, True])
def test_memory_is_wired_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_memory_wired: bool
) -> None:
    wired: list[bool] = []
    monkeypatch.setattr(mlx_lm, "maybe_set_recommended_wired_limit", lambda: wired.append(True))
    source = model_loader.ModelSource(path=tiny_model_dir(tmp_path, "llama"), model_id="tiny")
    settings = RunnerSettings(is_pipelined=False, is_memory_wired=is_memory_wired)
    tokenizer = model_loader.load_tokenizer(source)
    load_at_once(ModelRunner(source=source, tokenizer=tokenizer, settings=settings, clock=SystemClock()))
    assert wired == [True] * is_memory_wired


def test_a_chat_template_written_in_python_is_found(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, chat_template_type="deepseek_v32")
    wrapper = mlx_lm.read_tokenizer(folder, eos_token_ids=None, trust_remote_code=False)
    text = wrapper.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "<｜User｜>hi" in text
