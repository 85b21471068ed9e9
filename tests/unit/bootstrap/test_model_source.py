"""Model folders: what cannot be read without waiting for somebody is refused before anything is read."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from icehouse_server.bootstrap.model_source import (
    KeptTexts,
    ModelText,
    adapter_source,
    locate_model,
    locate_models,
    may_be_found,
)
from icehouse_server.config import ModelConfig
from icehouse_server.config.setting import NamedPath
from icehouse_server.engine.runner.model_loader import ModelSource
from icehouse_server.errors import ModelError, Reason
from icehouse_server.structured_output.compiler import GrammarCompiler

from tests.fixtures.models import tiny_model_dir

NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_in_a_models_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Libraries read these files too, and would wait for a writer without an end."""
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    good.mkdir()
    os.mkfifo(bad / name)
    for config in (ModelConfig(model=str(bad)), ModelConfig(model=str(good), draft_model=str(bad))):
        with pytest.raises(ModelError, match=name) as refused:
            locate_models(config, on_progress=lambda *_: None, on_size=lambda *_: None)
        assert refused.value.reason is Reason.MODEL_INVALID


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_a_pipe_in_an_adapters_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=name):
        adapter_source(NamedPath("one", str(tmp_path)))


def test_links_and_folders_are_part_of_a_models_folder(tmp_path: Path) -> None:
    """Those of the hub's cache are links; one that leads nowhere is left to whoever needs it."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "blob")
    (tmp_path / "model" / "more").mkdir()
    (tmp_path / "model" / "gone.json").symlink_to("nowhere")
    found = locate_model(ModelConfig(model=str(tmp_path / "model")), on_progress=lambda *_: None)
    assert found.path == tmp_path / "model"


def test_a_file_is_said_to_be_none(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("")
    with pytest.raises(ModelError, match=r"model\.gguf' is a file") as refused:
        locate_model(ModelConfig(model=str(file)), on_progress=lambda *_: None)
    assert refused.value.reason is Reason.MODEL_NOT_FOUND


def test_a_model_in_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(ModelError, match="there is no model folder at '~nobody-here/model'"):
        locate_model(ModelConfig(model="~nobody-here/model"), on_progress=lambda *_: None)
    assert not may_be_found("~nobody-here/model")


def test_the_text_of_a_model_that_comes_back_is_read_again_only_where_a_file_changed(tmp_path: Path) -> None:
    source = ModelSource(path=tiny_model_dir(tmp_path, "llama"), model_id="tiny")
    kept = KeptTexts()

    def read(source: ModelSource) -> ModelText:
        return kept.read(source, lambda read: GrammarCompiler(read, vocabulary_size=320, cache_limit=1))

    first = read(source)
    assert read(source) is first
    settings = source.path / "tokenizer_config.json"
    settings.write_text(settings.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    changed = read(source)
    assert changed is not first and read(source) is changed
    custom = dataclasses.replace(source, trust_remote_code=True)
    assert read(custom) is not read(custom)
