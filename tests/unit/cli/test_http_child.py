"""The HTTP front without a model: what the child is told, and how often it is started again."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from icehouse_http import command as front
from icehouse_http.serving.certificate import TlsFiles
from icehouse_http.serving.server import Listening
from icehouse_http.settings import Settings
from icehouse_server.cli import http_child
from icehouse_server.cli.http_child import LAST_WORDS_S, HttpChild, RestartDelays
from icehouse_server.config import Config, load_config

from tests.fixtures.patience import BOUND_S


def config(**settings: object) -> Config:
    """Return a config with an HTTP front; `settings` are `section__name=value`."""
    flags = {key.replace("__", "."): value for key, value in settings.items()}
    return load_config(flags={"http.port": 0, **flags}, environ={}).config


def told(config: Config) -> tuple[Settings, Listening]:
    """Return what the child makes of its command line: its settings, and where it listens."""
    with socket.socket() as passed_on:
        descriptor = passed_on.fileno()
        _, *words = http_child._command(config, descriptor=descriptor, private_socket=Path("/d/rpc"))
        assert words[:3] == ["-P", "-m", "icehouse_http.command"]
        given = front._parser().parse_args(words[3:])
    listening = front.listening_from(given)
    assert given.ends_with_stdin and listening.descriptor == descriptor
    return front.settings_from(given), listening


def test_settings_that_nobody_gave_are_the_fronts_own() -> None:
    settings, listening = told(config())
    assert settings == Settings(address="unix:/d/rpc", names=("127.0.0.1",))
    assert listening.tls is None
    assert listening.grace_s == config().server.drain_grace_s + LAST_WORDS_S


def test_every_setting_reaches_the_child() -> None:
    given = {
        "http__aliases": "gpt-5=tiny,o3=big",
        "http__strict_models": True,
        "http__exact_prompts": True,
        "http__temperature": 0.5,
        "http__allow_origins": "http://a,http://b",
        "http__host": "0.0.0.0",
        "http__names": "gpu-1,gpu-1.internal",
        "http__max_body_bytes": "2MiB",
        "http__body_memory_bytes": "3MiB",
        "security__health_open": False,
        "log__access_enabled": False,
    }
    settings, _ = told(config(**given))
    assert settings == Settings(
        address="unix:/d/rpc",
        watches_health=False,
        aliases={"gpt-5": "tiny", "o3": "big"},
        strict_models=True,
        exact_prompts=True,
        temperature=0.5,
        allow_origins=("http://a", "http://b"),
        names=("0.0.0.0", "gpu-1", "gpu-1.internal"),
        max_body_bytes=2 << 20,
        body_memory_bytes=3 << 20,
        has_access_log=False,
    )


def test_only_callers_of_other_machines_speak_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    for file in (certificate, key):
        file.touch()
    files = {"security__tls_certificate": str(certificate), "security__tls_key": str(key)}
    assert told(config(**files))[1].tls is None
    _, listening = told(config(**files, http__host="0.0.0.0"))
    assert listening.tls == TlsFiles(certificate, key)
    assert told(config(http__host="0.0.0.0"))[1].tls is None


def test_delays_double_up_to_a_bound_and_begin_anew_after_a_long_life() -> None:
    delays = RestartDelays()
    found = [delays.after(lived_s=1.0) for _ in range(12)]
    assert found[:4] == [0.1, 0.2, 0.4, 0.8] and found[-2:] == [30.0, 30.0]
    assert delays.after(lived_s=60.0) == 0.1


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[HttpChild]:
    """A front that was not started."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = HttpChild(config(), listening=listening, folder=tmp_path)
        yield made
        await made.stop(timeout_s=BOUND_S)


async def test_one_that_cannot_start_is_tried_again_until_the_stop(
    child: HttpChild, caplog: pytest.LogCaptureFixture
) -> None:
    child._command = ["/no/such/program"]
    await child.start()
    async with asyncio.timeout(BOUND_S):
        while caplog.text.count("http_not_started") < 3:
            await asyncio.sleep(0)
        await child.stop(timeout_s=BOUND_S)
    assert "stuck" not in caplog.text


async def test_one_that_does_not_end_is_killed(
    child: HttpChild, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    deaf = tmp_path / "deaf"
    child._command = ["/bin/sh", "-c", f"trap '' TERM; : > {deaf}; exec sleep 1000"]
    await child.start()
    async with asyncio.timeout(BOUND_S):
        while not deaf.exists():
            await asyncio.sleep(0)
        await child.stop(timeout_s=0.01)
    assert "stuck_http_killed" in caplog.text


async def test_its_folder_is_closed_to_others_and_goes_with_it() -> None:
    async with http_child.http_child(config()) as child:
        assert child is not None
        folder = child.private_socket.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


async def test_without_a_port_there_is_none() -> None:
    async with http_child.http_child(load_config(flags={}, environ={}).config) as child:
        assert child is None
