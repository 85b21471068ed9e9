"""The switches of the status page: what must be on with it, and where it may show text."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import urllib.parse

import pytest
from icehouse_server.bootstrap.telemetry import TelemetryParts, check_status_page, open_status_page
from icehouse_server.config import Config, load_config
from icehouse_server.errors import ConfigError, Reason, StartError
from icehouse_server.telemetry.prometheus import PrometheusMeter

from tests.unit.rpc.conftest import running

PAGE = {"telemetry.metrics_port": 0, "telemetry.status_page_enabled": True}
TEXT = {**PAGE, "telemetry.status_page_text_enabled": True}
EVERYWHERE = {"telemetry.metrics_host": "0.0.0.0"}
SECURE = {
    "security.token_file": "tokens",
    "security.tls_certificate": "server.pem",
    "security.tls_key": "server.key",
}
ALLOWED = {"security.allow_insecure_public": True}


def configured(flags: dict[str, object]) -> Config:
    return load_config(flags=flags, environ={}).config


def test_a_page_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.metrics_port is not set"):
        configured({"telemetry.status_page_enabled": True})


def test_text_is_off_unless_asked_for() -> None:
    assert not configured(PAGE).telemetry.status_page_text_enabled


def test_text_without_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.status_page_enabled is off"):
        configured({"telemetry.metrics_port": 0, "telemetry.status_page_text_enabled": True})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-name.invalid"])
@pytest.mark.parametrize("security", [{}, SECURE], ids=["open", "secured"])
def test_text_beyond_loopback_is_refused_whatever_secures_the_api(
    host: str, security: dict[str, object]
) -> None:
    config = configured({**TEXT, **security, "telemetry.metrics_host": host})
    with pytest.raises(StartError, match=r"--allow-insecure-public") as caught:
        TelemetryParts(config)
    assert caught.value.reason is Reason.ADDRESS_INSECURE and host in caught.value.message


@pytest.mark.parametrize(
    "flags",
    [
        {**TEXT},
        {**TEXT, "telemetry.metrics_host": "::1"},
        {**TEXT, "telemetry.metrics_host": "localhost"},
        {**TEXT, **EVERYWHERE, **ALLOWED},
        {**PAGE, **EVERYWHERE},
    ],
    ids=["loopback", "loopback_6", "localhost", "allowed", "without_text"],
)
def test_a_page_on_loopback_one_without_text_and_one_that_was_asked_for_twice_are_fine(
    flags: dict[str, object],
) -> None:
    check_status_page(configured(flags))


async def test_text_that_others_may_read_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as served:

        def opened(*flags: dict[str, object]) -> list[str]:
            caplog.clear()
            config = configured({key: value for some in flags for key, value in some.items()})
            open_status_page(config, served.server.observation, meter=PrometheusMeter(), clock=served.clock)
            return [record.message for record in caplog.records if record.levelno == logging.WARNING]

        assert opened(TEXT) == opened(PAGE, EVERYWHERE, ALLOWED) == []
        assert opened(TEXT, EVERYWHERE, ALLOWED) == ["status_page_text_left_open"]


async def test_the_endpoint_answers_to_the_names_of_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running() as served:
        parts = TelemetryParts(configured({**PAGE, "telemetry.metrics_names": " gpu-1.internal, gpu-2"}))
        parts.start(served.server, served.clock)
        try:
            [opened] = [record for record in caplog.records if record.message == "metrics_opened"]
            url = vars(opened)["url"]
            statuses = [
                await asyncio.to_thread(status_of, url, name)
                for name in ("gpu-1.internal", "gpu-2:9464", "gpu-3.internal")
            ]
        finally:
            await asyncio.to_thread(parts.stop)
    assert statuses == [200, 200, 421]


def status_of(url: str, name: str) -> int:
    """Ask for the metrics by this name."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Host": name})
        return connection.getresponse().status
