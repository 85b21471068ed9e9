"""The metrics port beside callers that open connections and say nothing."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterable, Iterator
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest
from icehouse_server.telemetry.http_server import CONNECTION_LIMIT, MetricsServer

from tests.fixtures.patience import BOUND_S


def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/broken":
        raise ArithmeticError("ours")
    start_response("200 OK", [("content-type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


@contextlib.contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[MetricsServer]:
    server = MetricsServer(host, 0, app)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def get(server: MetricsServer, path: str = "/metrics", host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, server.server_port, timeout=BOUND_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_listens_where_it_is_told(host: str) -> None:
    with serving(host) as server:
        assert get(server, host=host) == (200, b"/metrics")


def test_an_address_in_use_is_an_os_error() -> None:
    with serving() as server, pytest.raises(OSError):
        MetricsServer("127.0.0.1", server.server_port, app)


def test_those_who_say_nothing_make_room_and_take_no_more_threads() -> None:
    before = set(threading.enumerate())
    with serving() as server, contextlib.ExitStack() as stack:
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
