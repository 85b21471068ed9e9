"""What a start refuses at once: settings that cannot be used, before any model is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.bootstrap.group.leading import find_membership
from icehouse_server.cli import serve
from icehouse_server.cli.serve import ServiceManager
from icehouse_server.clock import SystemClock
from icehouse_server.config import load_config
from icehouse_server.device import find_device
from icehouse_server.errors import ConfigError, IcehouseError

from tests.fixtures.rpc.authority import Authority

CERTIFICATE = {"security.tls_certificate": "server.pem", "security.tls_key": "server.key"}
ADAPTER = {"model.adapter_path": "adapter"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tokens that are not there": (
        {"security.token_file": "missing"},
        "the token file .*missing cannot be used: No such file or directory",
    ),
    "tokens that are none": ({"security.token_file": "junk"}, "junk cannot be used: line 1"),
    "a certificate that is not there": (
        {**CERTIFICATE, "security.tls_certificate": "missing"},
        "missing cannot be used: No such file or directory",
    ),
    "a key of no certificate": (
        {**CERTIFICATE, "security.tls_key": "junk"},
        "it cannot be loaded with the key .*junk",
    ),
    "authorities that are none": (
        {**CERTIFICATE, "security.tls_client_ca": "junk"},
        "junk cannot be used: it has no CA certificate",
    ),
    "the cache's key that is not there": (
        {"cache.key_file": "missing"},
        "the key file .*missing cannot be read: No such file or directory",
    ),
    "the cache's key that is none": ({"cache.key_file": "junk"}, "the key file .*junk is not a key"),
    "a command that gives no key": ({"cache.key_command": "false"}, "'false' ended with 1"),
    "a store that is none": ({"cache.shared_url": "nowhere://at/all"}, "is not the URL of an object store"),
    "an adapter that is not there": (
        {"model.adapter_path": "missing"},
        "missing/adapter_config.json cannot be read: No such file or directory",
    ),
    "an adapter without weights": ({"model.adapter_path": "empty"}, "has no adapters.safetensors"),
    "one adapter of several": (
        {"model.adapters": "a=missing"},
        "missing/adapter_config.json cannot be read: No such file or directory",
    ),
    "images of no folder": ({"server.image_folders": "pictures"}, "which is not a plain absolute path"),
    "events for everybody": ({"kv_events.zmq_endpoint": "tcp://0.0.0.0:5557"}, "is open to other machines"),
}
_PATHS = ("_file", "_certificate", "_key", "_ca", "_path")


def flags_of(folder: Path, wrong: dict[str, Any]) -> dict[str, Any]:
    """Return flags with a model that is not there, and these, whose files lie in a folder."""
    Authority().write_server(folder)
    (folder / "junk").write_text("x")
    (folder / "junk").chmod(0o600)
    (folder / "empty").mkdir()
    (folder / "empty" / "adapter_config.json").write_text("{}")
    named = {key: str(folder / value) if key.endswith(_PATHS) else value for key, value in wrong.items()}
    if "model.adapters" in named:
        named["model.adapters"] = f"a={folder}/missing"
    fixed = {"server.port": 0, "cache.directory": str(folder / "cache"), "model.model": "no/such folder"}
    return {**fixed, **named}


@pytest.mark.parametrize(("wrong", "told"), REFUSED.values(), ids=list(REFUSED))
async def test_a_wrong_setting_is_refused_before_a_model_is_looked_for(
    tmp_path: Path, wrong: dict[str, Any], told: str
) -> None:
    config = load_config(flags=flags_of(tmp_path, wrong), environ={}).config
    with pytest.raises(IcehouseError, match=told):
        await serve._serve(config, SystemClock(), ServiceManager(None), find_device())


@pytest.mark.parametrize("what", ["the cache's key that is none", "an adapter that is not there"])
def test_a_follower_refuses_its_wrong_settings_before_a_model_is_looked_for(
    tmp_path: Path, what: str
) -> None:
    wrong, told = REFUSED[what]
    (tmp_path / "hosts.json").write_text(json.dumps([["127.0.0.1:5000"], ["127.0.0.1:5001"]]))
    group = {"group.hosts": str(tmp_path / "hosts.json"), "group.rank": 1}
    config = load_config(flags=flags_of(tmp_path, {**wrong, **group}), environ={}).config
    membership = find_membership(config)
    assert membership is not None
    with pytest.raises(IcehouseError, match=told):
        serve._follow(config, SystemClock(), find_device(), membership)


@pytest.mark.parametrize(
    "unserved", [{"model.draft_model": "other"}, {"cache.shared_url": "file:///srv/blocks"}]
)
def test_what_a_group_does_not_serve_is_refused_as_the_group_is_read(
    tmp_path: Path, unserved: dict[str, Any]
) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([["127.0.0.1:5000"], ["127.0.0.1:5001"]]))
    group = {"group.hosts": str(tmp_path / "hosts.json"), "group.rank": 1}
    config = load_config(flags={**group, **unserved}, environ={}).config
    with pytest.raises(ConfigError, match="which a group does not serve"):
        find_membership(config)


def test_a_group_does_not_serve_several_models(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([["127.0.0.1:5000"], ["127.0.0.1:5001"]]))
    (tmp_path / "icehouse.toml").write_text('[[models]]\nmodel = "a"\n\n[[models]]\nmodel = "b"\n')
    group = {"group.hosts": str(tmp_path / "hosts.json"), "group.rank": 0}
    config = load_config(file=tmp_path / "icehouse.toml", flags=group, environ={}).config
    with pytest.raises(ConfigError, match="models is set, which a group does not serve"):
        find_membership(config)
