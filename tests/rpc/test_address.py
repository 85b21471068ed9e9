"""Where the server listens, and what it says when it cannot."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import inference_service_pb2 as messages

from service.errors import Reason, StartError
from tests.rpc.conftest import House, running_house

REQUEST = messages.GenerateRequest(text="Hi", max_output_tokens=1)


async def start_error(**settings: Any) -> StartError:
    with pytest.raises(StartError) as caught:
        async with running_house(**settings):
            pass
    assert caught.value.reason is Reason.ADDRESS_IN_USE
    return caught.value


async def test_taken_port_is_named_with_what_to_do(house: House) -> None:
    port = int(house.server.address.rsplit(":", 1)[1])
    error = await start_error(port=port)
    assert str(port) in error.message and "--port" in error.message
    assert error.metadata["port"] == str(port)


async def test_port_taken_by_another_program_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is taken" in (await start_error(port=port)).message


async def test_address_of_another_machine_is_named() -> None:
    error = await start_error(host="192.0.2.1")
    assert "192.0.2.1" in error.message and "--host" in error.message


async def test_unix_socket_serves_its_owner_only_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with running_house(uds=str(path)) as house:
        assert house.server.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await house.inference.Generate(REQUEST)).text == " w0"
    assert not path.exists()


async def test_second_server_does_not_take_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with running_house(uds=str(path)) as house:
        assert "another server listens" in (await start_error(uds=str(path))).message
        assert (await house.inference.Generate(REQUEST)).text == " w0"


async def test_socket_left_by_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with running_house(uds=str(path)) as house:
        assert (await house.inference.Generate(REQUEST)).text == " w0"


async def test_impossible_socket_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert "no socket" in (await start_error(uds=str(tmp_path / "file"))).message
    assert (tmp_path / "file").read_text() == "precious"
    assert "does not exist" in (await start_error(uds=str(tmp_path / "no" / "s"))).message
    assert "limit is 103" in (await start_error(uds="/tmp/" + "x" * 100)).message
