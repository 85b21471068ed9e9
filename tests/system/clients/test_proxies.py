"""Proxies of the environment: asked for servers elsewhere, never for one on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from icehouse_client import AsyncClient, Client, IcehouseClientError
from icehouse_client.proxies import is_local, proxy_variable
from icehouse_server.cli.main import app
from typer.testing import CliRunner

from tests.fixtures.proxy import VARIABLES, RefusingProxy

REMOTE = "icehouse.invalid:50051"
HERE = ["127.0.0.1:{}", "localhost:{}", "dns:///localhost:{}", "ipv4:127.0.0.1:{}"]


@pytest.fixture
def proxy() -> Iterator[RefusingProxy]:
    """A proxy that no variable names yet."""
    with RefusingProxy().serving() as serving:
        yield serving


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Port of a server that answers health checks."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("icehouse.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("target", HERE)
async def test_a_server_on_this_machine_is_asked_itself(
    port: int, target: str, variable: str, proxy: RefusingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.name_in(monkeypatch, variable)
    address = target.format(port)
    with Client(address, timeout_s=60) as client:
        assert client.health() == "SERVING"
    async with AsyncClient(address, timeout_s=60) as asking:
        assert await asking.health() == "SERVING"
    assert proxy.asked == []


@pytest.mark.parametrize("variable", VARIABLES[:3])
async def test_one_elsewhere_is_asked_through_the_proxy(
    variable: str, proxy: RefusingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.name_in(monkeypatch, variable)
    with Client(REMOTE) as client, pytest.raises(IcehouseClientError):
        client.health(timeout_s=60)
    assert f"CONNECT {REMOTE} HTTP/1.1" in proxy.asked
    told = len(proxy.asked)
    async with AsyncClient(REMOTE) as asking:
        with pytest.raises(IcehouseClientError):
            await asking.health(timeout_s=60)
    assert len(proxy.asked) > told
    assert proxy_variable(REMOTE) == variable


def test_what_is_excepted_from_proxies_stays_so(
    proxy: RefusingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.name_in(monkeypatch, "http_proxy")
    monkeypatch.setenv("no_proxy", "invalid")
    with Client(REMOTE) as client, pytest.raises(IcehouseClientError):
        client.health(timeout_s=60)
    assert proxy.asked == [] and proxy_variable(REMOTE) is None


def test_the_command_line_says_so_too(
    port: int, proxy: RefusingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.name_in(monkeypatch, "http_proxy", "https_proxy")
    run = CliRunner().invoke
    found = run(app, ["health", "--address", f"localhost:{port}", "--timeout-s", "60"])
    assert (found.exit_code, found.output.strip()) == (0, "SERVING") and proxy.asked == []
    failed = run(app, ["health", "--address", REMOTE, "--timeout-s", "60"])
    assert failed.exit_code == 1 and proxy.asked
    assert "the proxy that https_proxy names" in failed.output and "no_proxy" in failed.output


LOCAL = [
    *("localhost", "localhost:1", "LocalHost:1", "localhost.:1", "a.localhost:1", "127.0.0.1", "127.9.9.9:1"),
    *("::1", "[::1]", "[::1]:1", "[::1%lo]:1", "[::ffff:127.0.0.1]:1", "0.0.0.0:1", "[::]:1"),
    *("dns:localhost:1", "dns://8.8.8.8/localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1"),
    *("ipv6:%5B::1%5D:1", "unix:/a", "unix:///a", "unix:a", "unix-abstract:a"),
]
ELSEWHERE = [
    *("icehouse:1", "localhost.example:1", "notlocalhost:1", "127.0.0.1.example:1", "128.0.0.1:1", "[::2]:1"),
    *("ipv4:127.0.0.1:1,10.0.0.1:1", "xds:///localhost", "10.0.0.1", "dns:///icehouse:1", "[fe80::1]:1"),
    *(":1", "["),
]


@pytest.mark.parametrize("address", [*LOCAL, *ELSEWHERE])
def test_which_addresses_are_of_this_machine(address: str) -> None:
    assert is_local(address) is (address in LOCAL)
