"""Who listens at an address: an Icehouse is told from others, whatever it wants of its callers."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from icehouse_server.config import SecurityConfig, ServerConfig
from icehouse_server.rpc.access.tokens import new_token
from icehouse_server.rpc.own_server import OwnServer, find_own_server

from tests.fixtures.rpc.authority import Authority
from tests.unit.rpc.access.test_certificates import tls
from tests.unit.rpc.access.test_tokens import line, write
from tests.unit.rpc.conftest import RunningServer, running


def config_of(served: RunningServer) -> ServerConfig:
    return ServerConfig(port=int(served.server.address.rpartition(":")[2]))


async def find(config: ServerConfig, security: SecurityConfig | None = None) -> OwnServer:
    return await asyncio.to_thread(find_own_server, config, security or SecurityConfig())


@pytest.mark.parametrize("ready", [True, False])
async def test_a_server_in_plain_text_says_whether_it_serves(ready: bool) -> None:
    async with running(ready=ready) as served:
        expected = OwnServer.RUNNING if ready else OwnServer.NOT_SERVING
        assert await find(config_of(served)) is expected


@pytest.mark.parametrize("health_open", [True, False])
async def test_one_that_wants_tokens_is_known_too(tmp_path: Path, health_open: bool) -> None:
    write(tmp_path / "tokens", line(new_token(), "search"))
    security = SecurityConfig(token_file=str(tmp_path / "tokens"), health_open=health_open)
    async with running(security=security) as served:
        assert await find(config_of(served), security) is OwnServer.RUNNING


@pytest.mark.parametrize("mutual", [True, False])
async def test_one_with_tls_is_known_by_its_certificate(tmp_path: Path, mutual: bool) -> None:
    authority = Authority()
    security = tls(authority, tmp_path, mutual=mutual)
    async with running(security=security) as served:
        assert await find(config_of(served), security) is OwnServer.RUNNING
        other = SecurityConfig(tls_certificate=str(tmp_path / "ours.pem"), tls_key=security.tls_key)
        (tmp_path / "ours.pem").write_bytes(authority.issue("ours")[0])
        assert await find(config_of(served), other) is OwnServer.ABSENT
        (tmp_path / "ours.pem").write_bytes(b"no certificate")
        assert await find(config_of(served), other) is OwnServer.ABSENT


async def test_a_socket_is_asked_too(tmp_path: Path) -> None:
    async with running(uds=str(tmp_path / "s")):
        assert await find(ServerConfig(uds=str(tmp_path / "s"))) is OwnServer.RUNNING
    assert await find(ServerConfig(uds=str(tmp_path / "s"))) is OwnServer.ABSENT


async def test_others_and_nobody_are_no_server_of_ours() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        config = ServerConfig(port=other.getsockname()[1])
        assert await find(config) is OwnServer.ABSENT
        other.listen()

        def hang_up() -> None:
            other.settimeout(30)
            other.accept()[0].close()

        hanging_up = asyncio.create_task(asyncio.to_thread(hang_up))
        assert await find(config) is OwnServer.ABSENT
        await hanging_up
