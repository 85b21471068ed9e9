"""The worker protocol as the configuration wants it, with its extra and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from icehouse_server.bootstrap.telemetry import worker_models, worker_parts
from icehouse_server.config import Config, FleetConfig
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.runner.model_loader import ModelSource
from icehouse_server.errors import ConfigError

from tests.fixtures.kv_event_source import source_of
from tests.fixtures.rpc.worker import needs_protocol

ON = Config(fleet=FleetConfig(worker_enabled=True))


def source(path: Path, **config: object) -> ModelSource:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}), encoding="utf-8")
    return ModelSource(path=path, model_id="tiny", dtype="")


def test_it_is_off_unless_asked_for() -> None:
    assert worker_models(Config(), ports={}) is None


@needs_protocol
async def test_the_folder_s_facts_are_told(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "bos_token_id": [3, 4], "pad_token_id": None}
    defaults = {"temperature": 0.5, "top_k": 20, "do_sample": True, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    events = source_of(BlockLog(), block_token_count=4)
    parts = worker_parts(ON, source(tmp_path, **config), running_limit=4, kv_events=events)
    assert (parts.path, parts.architectures) == (str(tmp_path), ("LlamaForCausalLM",))
    assert (parts.bos_token_id, parts.pad_token_id, parts.running_limit) == (3, 0, 4)
    assert parts.default_sampling == {"temperature": 0.5, "top_k": 20.0}
    assert parts.block_token_count == ON.cache.block_token_count
    assert len(parts.read_archive().data) > 0


@needs_protocol
@pytest.mark.parametrize("is_on", [False, True])
async def test_whether_operators_see_tokens_is_the_settings(tmp_path: Path, is_on: bool) -> None:
    from icehouse_server.rpc.worker.kv_event_streams import KvEventStreams

    fleet = FleetConfig(worker_enabled=True, operator_kv_tokens_enabled=is_on)
    events = source_of(BlockLog(), block_token_count=4)
    parts = worker_parts(Config(fleet=fleet), source(tmp_path), running_limit=4, kv_events=events)
    assert isinstance(parts.kv_events, KvEventStreams)
    assert parts.kv_events.operators_see_tokens is is_on


def test_without_the_extra_the_start_says_which_one_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("icehouse_server.rpc.worker", "smg_grpc"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[fleet\]'") as caught:
        worker_models(ON, ports={})
    assert caught.value.field == "fleet.worker_enabled"
