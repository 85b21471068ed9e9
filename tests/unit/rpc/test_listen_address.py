"""Where the server listens, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse_server.config import HttpConfig, SecurityConfig, ServerConfig
from icehouse_server.errors import Reason, StartError
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token
from icehouse_server.rpc.listen_address import bind, is_loopback, listen_for_http

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority
from tests.unit.rpc.conftest import RunningServer, running

NOBODY = 65534

REQUEST = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)


async def start_error(*, reason: Reason = Reason.ADDRESS_IN_USE, **settings: Any) -> StartError:
    with pytest.raises(StartError) as caught:
        async with running(**settings):
            pass
    assert caught.value.reason is reason
    return caught.value


async def test_taken_port_is_named_with_what_to_do(served: RunningServer) -> None:
    port = int(served.server.address.rsplit(":", 1)[1])
    error = await start_error(port=port)
    assert str(port) in error.message and "--port" in error.message
    assert error.metadata["port"] == str(port)


async def test_port_taken_by_another_program_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is taken" in (await start_error(port=port)).message


async def test_address_of_another_machine_is_named() -> None:
    error = await start_error(host="192.0.2.1", security=SecurityConfig(allow_insecure_public=True))
    assert "192.0.2.1" in error.message and "--host" in error.message


async def test_unix_socket_serves_its_owner_only_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with running(uds=str(path)) as served:
        assert served.server.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await served.inference.Generate(REQUEST)).text == " w0"
    assert not path.exists()


async def test_second_server_does_not_take_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with running(uds=str(path)) as served:
        assert "another server is listening" in (await start_error(uds=str(path))).message
        assert (await served.inference.Generate(REQUEST)).text == " w0"


async def test_socket_left_by_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with running(uds=str(path)) as served:
        assert (await served.inference.Generate(REQUEST)).text == " w0"


async def test_impossible_socket_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert "not a socket" in (await start_error(uds=str(tmp_path / "file"))).message
    assert (tmp_path / "file").read_text() == "precious"
    assert "does not exist" in (await start_error(uds=str(tmp_path / "no" / "no" / "s"))).message
    assert "limit is 103" in (await start_error(uds="/tmp/" + "x" * 100)).message


async def test_the_socket_is_its_owners_from_its_first_moment(tmp_path: Path) -> None:
    modes = []
    path = tmp_path / "new" / "s"
    server = grpc.aio.server()
    bind(server, ServerConfig(uds=str(path)), SecurityConfig(), credentials=None)
    modes.append(stat.S_IMODE(path.stat().st_mode))
    await server.stop(None)
    assert modes == [0o600]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert "swap the socket" in (await start_error(uds=str(folder / "s"))).message
    folder.chmod(0o1777)
    async with running(uds=str(folder / "s")) as served:
        assert (await served.inference.Generate(REQUEST)).text == " w0"


async def test_a_folder_further_up_that_others_may_write_is_refused(tmp_path: Path) -> None:
    top = tmp_path / "open"
    (top / "mine").mkdir(parents=True, mode=0o700)
    top.chmod(0o777)
    message = (await start_error(uds=str(top / "mine" / "s"))).message
    assert "swap the socket" in message and str(top) in message
    # So does a link there, however safe the folder is that it leads to.
    (tmp_path / "safe").mkdir(mode=0o700)
    (top / "link").symlink_to(tmp_path / "safe")
    for way in (top / "link" / "s", tmp_path / "by" / "link" / "s"):
        if way.parts[-3] == "by":
            (tmp_path / "by").symlink_to("open")
        assert str(top) in (await start_error(uds=str(way))).message
    top.chmod(0o1777)
    async with running(uds=str(tmp_path / "by" / "link" / "s")) as served:
        assert (await served.inference.Generate(REQUEST)).text == " w0"
        assert (tmp_path / "safe" / "s").is_socket()


async def test_links_in_a_circle_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "does not exist" in (await start_error(uds=str(tmp_path / "a" / "s"))).message


async def test_a_stopped_server_leaves_a_socket_alone_that_is_anothers(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        async with running(uds=str(path)):
            path.unlink()
            other.bind(str(path))
            other.listen()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")
async def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    assert "belongs to user 12345" in (await start_error(uds=str(folder / "s"))).message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid"])
@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({}, ("TLS", "callers")),
        ({"token_file": "t"}, ("TLS",)),
        ({"tls_certificate": "c", "tls_key": "k"}, ("callers",)),
    ],
)
async def test_a_public_address_without_security_is_refused(
    host: str, settings: dict[str, str], lacking: tuple[str, ...]
) -> None:
    server = grpc.aio.server()
    with pytest.raises(StartError) as caught:
        bind(server, ServerConfig(host=host, port=0), SecurityConfig(**settings), credentials=None)
    assert caught.value.reason is Reason.ADDRESS_INSECURE
    assert all(word in caught.value.message for word in lacking)
    assert "--allow-insecure-public" in caught.value.message
    await server.stop(None)


async def test_a_public_address_may_be_insisted_on(caplog: pytest.LogCaptureFixture) -> None:
    async with running(host="0.0.0.0", security=SecurityConfig(allow_insecure_public=True)) as served:
        assert served.server.address.startswith("0.0.0.0:")
    (record,) = (record for record in caplog.records if record.getMessage() == "door_left_open")
    assert vars(record)["host"] == "0.0.0.0" and "TLS" in vars(record)["missing"]


async def test_a_private_socket_needs_no_tls_but_every_token(tmp_path: Path) -> None:
    certificate, key = Authority().write_server(tmp_path)
    token, file, path = new_token(), tmp_path / "tokens", tmp_path / "s"
    file.write_text(line_of(token, tenant="search", role=CallerRole.TENANT, expire_date=None))
    file.chmod(0o600)
    security = SecurityConfig(tls_certificate=str(certificate), tls_key=str(key), token_file=str(file))
    async with running(security=security, private_socket=path) as served:
        assert served.server.address.startswith("127.0.0.1:")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(REQUEST)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            known = (("authorization", f"Bearer {token}"),)
            assert (await stub.Generate(REQUEST, metadata=known)).text == " w0"
    assert not path.exists()


def test_a_port_of_http_that_cannot_be_had_is_named_with_its_own_option() -> None:
    with listen_for_http(HttpConfig(port=0), SecurityConfig()) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(StartError) as caught:
            listen_for_http(HttpConfig(port=port), SecurityConfig())
    assert f"port {port} on 127.0.0.1 is taken" in caught.value.message
    assert "another port with --http-port" in caught.value.message
    with pytest.raises(StartError, match="another address with --http-host"):
        listen_for_http(HttpConfig(port=0, host="192.0.2.1"), SecurityConfig(allow_insecure_public=True))


def test_http_left_open_to_other_machines_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StartError) as caught:
        listen_for_http(HttpConfig(port=0, host="0.0.0.0"), SecurityConfig())
    assert caught.value.reason is Reason.ADDRESS_INSECURE and caplog.records == []
    listen_for_http(HttpConfig(port=0, host="0.0.0.0"), SecurityConfig(allow_insecure_public=True)).close()
    assert [record.getMessage() for record in caplog.records] == ["door_left_open"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("credentials", [None, "local"])
async def test_grpc_tells_nothing_of_a_unix_peer(tmp_path: Path, credentials: str | None) -> None:
    """Why permissions are the credentials here. When this fails, gRPC tells who calls: use it then."""
    told: list[tuple[str, dict[str, list[bytes]]]] = []

    class Teller(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            async def tell(request: bytes, context: Any) -> bytes:
                told.append((context.peer(), {k: list(v) for k, v in context.auth_context().items()}))
                return b""

            return grpc.unary_unary_rpc_method_handler(tell)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Teller(),))
    path = f"unix:{tmp_path / 's'}"
    if credentials is None:
        server.add_insecure_port(path)
        channel = grpc.aio.insecure_channel(path)
    else:
        kind = grpc.LocalConnectionType.UDS
        server.add_secure_port(path, grpc.local_server_credentials(kind))
        channel = grpc.aio.secure_channel(path, grpc.local_channel_credentials(kind))
    await server.start()
    async with channel:
        call: Any = channel.unary_unary("/any/Method")(b"", timeout=BOUND_S)
        await call
    await server.stop(None)
    [(peer, context)] = told
    assert peer == "unix:"
    assert set(context) == {"transport_security_type", "security_level"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
async def test_another_user_cannot_connect() -> None:
    with tempfile.TemporaryDirectory(prefix="icehouse-") as folder:
        # Open to all, so that nothing but the socket's own permissions stands in the way.
        os.chmod(folder, 0o755)
        path = Path(folder) / "s"
        async with running(uds=str(path)):
            assert await connect_error(path, user_id=NOBODY) == errno.EACCES
            assert await connect_error(path, user_id=0) == 0


async def connect_error(path: Path, *, user_id: int) -> int:
    """Return what the system tells this user who connects; 0 for a connection."""
    program = (
        "import os, socket, sys; socket_ = socket.socket(socket.AF_UNIX); os.setuid(int(sys.argv[2])); "
        "sys.exit(socket_.connect_ex(sys.argv[1]))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", program, str(path), str(user_id)
    )
    return await process.wait()
