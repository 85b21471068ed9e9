"""The metrics port beside callers that open connections and say nothing."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterable, Iterator
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest
from icehouse_server.telemetry.prometheus import CONNECTION_LIMIT, MetricsServer

from tests.fixtures.patience import BOUND_S


def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/broken":
        raise ArithmeticError("ours")
    start_response("200 OK", [("content-type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


@contextlib.contextmanager
def serving(host: str = "127.0.0.1", *names: str) -> Iterator[MetricsServer]:
    server = MetricsServer(host, 0, app, names=names)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def get(
    server: MetricsServer, path: str = "/metrics", host: str = "127.0.0.1", *, named: str | None = None
) -> tuple[int, bytes]:
    """Ask at `host`, and say that it is `named`."""
    connection = http.client.HTTPConnection(host, server.server_port, timeout=BOUND_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={} if named is None else {"Host": named})
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_listens_where_it_is_told(host: str) -> None:
    with serving(host) as server:
        assert get(server, host=host) == (200, b"/metrics")


@pytest.fixture(scope="module", params=["127.0.0.1", "0.0.0.0"])
def named_server(request: pytest.FixtureRequest) -> Iterator[MetricsServer]:
    with serving(request.param, "Icehouse.internal", "gpu-1") as server:
        yield server


@pytest.mark.parametrize("path", ["/", "/metrics", "/status.json", "/anything"])
@pytest.mark.parametrize(
    ("named", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("10.1.2.3:9464", 200),
        ("[fe80::1]:9464", 200),
        ("localhost:9464", 200),
        ("LocalHost", 200),
        ("icehouse.internal:9464", 200),
        ("gpu-1", 200),
        ("rebound.example:9464", 421),
        ("127.0.0.1.rebound.example", 421),
        ("icehouse.internal.rebound.example", 421),
        ("gpu-2", 421),
        ("localhost@rebound.example", 421),
        ("[::1", 421),
        ("", 421),
    ],
)
def test_only_addresses_and_names_that_are_its_own_are_answered(
    named_server: MetricsServer, path: str, named: str, status: int
) -> None:
    answered, text = get(named_server, path, named=named)
    assert answered == status
    assert (text == path.encode()) == (status == 200)


def test_the_name_that_it_listens_by_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
    with serving("metrics.internal") as server:
        monkeypatch.undo()
        assert get(server, named="metrics.internal:9464")[0] == 200
        assert get(server, named="rebound.example")[0] == 421


def test_whoever_wants_may_have_any_name() -> None:
    with serving("127.0.0.1", "*") as server:
        assert get(server, named="rebound.example")[0] == 200


def test_a_probe_that_says_no_name_is_answered() -> None:
    # No browser leaves it out: HTTP/1.0 probes of load balancers do.
    with serving() as server:
        probe = socket.create_connection(("127.0.0.1", server.server_port), timeout=BOUND_S)
        with contextlib.closing(probe):
            probe.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b" 200 OK" in probe.makefile("rb").readline()


def test_an_address_in_use_is_an_os_error() -> None:
    with serving() as server, pytest.raises(OSError):
        MetricsServer("127.0.0.1", server.server_port, app)


def test_those_who_say_nothing_make_room_and_take_no_more_threads() -> None:
    with serving() as server, contextlib.ExitStack() as stack:
        before = set(threading.enumerate())  # the server's own among them, which goes on
        silent = []
        for number in range(3 * CONNECTION_LIMIT):
            connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=BOUND_S)
            silent.append(stack.enter_context(connection))
            if number % 2:
                connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert get(server) == (200, b"/metrics")
        for connection in silent[: 2 * CONNECTION_LIMIT]:
            assert connection.recv(1) == b"", "the oldest are ended"
        threads = [thread for thread in threading.enumerate() if thread not in before]
        for thread in threads[: -CONNECTION_LIMIT - 1]:
            thread.join(BOUND_S)
            assert not thread.is_alive()


def test_a_stop_ends_who_is_connected() -> None:
    with contextlib.ExitStack() as stack:
        with serving() as server:
            silent = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.server_port), timeout=BOUND_S)
            )
            assert get(server) == (200, b"/metrics")
        assert silent.recv(1) == b""


def test_a_page_that_fails_is_the_callers_500_and_the_next_one_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving() as server:
        assert get(server, "/broken")[0] == 500
        assert get(server) == (200, b"/metrics")
    assert "ArithmeticError: ours" in capsys.readouterr().err
