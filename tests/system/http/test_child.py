"""The HTTP front as the server's child: it answers, comes back, and goes when the server goes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path

import httpx2
import pytest
from icehouse_server.bootstrap.model_source import OnSize, ServedModels
from icehouse_server.cli import serve
from icehouse_server.config import ModelConfig
from icehouse_server.demo.build import OnProgress

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess
from tests.system.http.served import CHAT, ServedFront, body, streaming, wait_for_end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


def test_it_answers_and_comes_back_when_it_is_killed(model: Path, tmp_path: Path) -> None:
    front = ServedFront(model, tmp_path, "--http-aliases", "gpt-5=llama")
    with front.server as server, httpx2.Client(base_url=front.url, timeout=BOUND_S) as http:
        server.wait_until_serving()
        assert http.post(CHAT, json=body()).json()["usage"]["completion_tokens"] == 8
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["llama", "gpt-5"]
        killed = front.kill_child()
        # It waits in the socket's queue until the next child takes it up.
        assert httpx2.post(f"{front.url}{CHAT}", json=body(), timeout=BOUND_S).status_code == 200
        assert front.child_pid != killed
        assert f"http_died code={-signal.SIGKILL}" in front.log
        server.terminate()
        assert server.wait() == 0
    assert f"http={front.url}" in front.log and "stuck" not in front.log
    assert not front.is_listening()


def test_it_goes_with_a_server_that_is_killed(model: Path, tmp_path: Path) -> None:
    front = ServedFront(model, tmp_path)
    with front.server as server:
        server.wait_until_serving()
        assert httpx2.get(f"{front.url}/health", timeout=BOUND_S).json() == {"status": "SERVING"}
        with front.connect() as witness:
            server.kill()
            wait_for_end(witness)
        front.wait_until_closed()


def test_a_stream_ends_as_it_would_when_the_server_is_told_to_stop(model: Path, tmp_path: Path) -> None:
    front = ServedFront(model, tmp_path)
    with front.server as server:
        server.wait_until_serving()
        with streaming(front, max_tokens=300) as lines:
            server.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in "".join(rest)
        assert server.wait() == 0
    assert "drain_started" in front.log and "http_stopped" in front.log and "stuck" not in front.log


def test_a_signal_to_every_process_ends_no_stream_sooner(model: Path, tmp_path: Path) -> None:
    """As systemd sends it: the child has it from there and once more from the server."""
    front = ServedFront(model, tmp_path, "--log-format", "json")
    with front.server as server:
        server.wait_until_serving()
        with streaming(front, max_tokens=300) as lines:
            os.kill(front.child_pid, signal.SIGTERM)
            server.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0
    # Both processes write to one log, in one form.
    events = [json.loads(line) for line in front.log.splitlines()]
    by_name = {event["message"]: event for event in events}
    assert "http_died" not in by_name
    ended, call = by_name["http_request_ended"], by_name["call_ended"]
    assert ended["request_id"] == call["request_id"] and ended["logger"] == "icehouse.http.access"


def stuck() -> None:
    """Have the server look for its model without an end."""

    def wait(
        config: ModelConfig, *, on_progress: OnProgress, on_size: OnSize, dtype: str = ""
    ) -> ServedModels:
        threading.Event().wait()
        raise AssertionError("nobody sets it")

    serve.locate_models = wait  # type: ignore[attr-defined]


def test_until_there_is_a_model_it_says_when_to_come_again(model: Path, tmp_path: Path) -> None:
    front = ServedFront(model, tmp_path, break_it=stuck)
    with front.server, httpx2.Client(base_url=front.url, timeout=BOUND_S) as http:
        front.wait_until_listening()
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = http.post(path, json=body())
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 503
    assert "tokenizer_read" not in front.log


def test_a_second_signal_ends_both_at_once(model: Path, tmp_path: Path) -> None:
    front = ServedFront(model, tmp_path)
    with front.server as server:
        server.wait_until_serving()
        with streaming(front, max_tokens=4000) as lines:
            server.terminate()
            while front.is_listening():
                # New callers are turned away although the stream goes on.
                assert next(lines) is not None
            server.terminate()
            # Whether the child still tells of it depends on what it notices first.
            with contextlib.suppress(httpx2.RemoteProtocolError):
                assert "data: [DONE]" not in list(lines)
        assert server.wait() == 128 + signal.SIGTERM


def test_a_taken_port_is_refused_before_any_model_is_looked_for(model: Path, tmp_path: Path) -> None:
    front = ServedFront(model, tmp_path)
    with socket.create_server(("127.0.0.1", front.port)), front.server as server:
        assert server.wait() == 1
    assert f"port {front.port} on 127.0.0.1 is taken" in front.log and "--http-port" in front.log
    assert "model_found" not in front.log


def test_nothing_listens_in_a_server_without_a_port_for_it(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServerProcess(model=model, directory=tmp_path / "blocks", log=log) as server:
        server.wait_until_serving()
        server.terminate()
        assert server.wait() == 0
    assert "http" not in log.read_text()
