"""A real server whose cache disk hangs: requests are answered, and SIGTERM ends it in order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse_server.engine.prefix_cache.tiers import storage_waits
from icehouse_server.storage import api
from icehouse_server.storage.files import Files
from icehouse_server.storage.local import model_tiers, tier
from icehouse_server.storage.local.directory.store import BlockStore

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess
from tests.system.load.live_server import request

OPTIONS: tuple[str, ...] = (
    "--block-token-count",
    "16",
    "--min-prefix-token-count",
    "0",
    "--drain-grace-s",
    "5",
)
OPTIONS += ("--no-restore-or-recompute",)


def wait_less() -> None:
    """Have a server take for hung after two seconds what it does after five."""
    for module in (api, tier, model_tiers, storage_waits):
        vars(module)["STALL_LIMIT_S"] = 2.0
    vars(storage_waits)["_MOST_S"] = 2.0


def hang_block_reads() -> None:
    """Have no read of a block return, in the server's process."""
    wait_less()
    real_open, real_read = Files.open, Files.read_into
    blocks: set[int] = set()

    def open_file(self: Files, path: str) -> int:
        descriptor = real_open(self, path)
        if path.endswith(".safetensors") and "/blocks/" in path:
            blocks.add(descriptor)
        return descriptor

    def read_into(self: Files, descriptor: int, *args: Any, **kwargs: Any) -> int:
        if descriptor in blocks:
            threading.Event().wait()
        return real_read(self, descriptor, *args, **kwargs)

    Files.open, Files.read_into = open_file, read_into  # type: ignore[method-assign, assignment]


def hang_store() -> None:
    """Have the cache directory never open."""
    wait_less()
    BlockStore.open = lambda self: threading.Event().wait()  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


class Caller:
    """Calls to one server."""

    def __init__(self, server: ServerProcess) -> None:
        self._channel = grpc.insecure_channel(server.address)
        self._stub: Any = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, name: str) -> messages.GenerateResponse:
        wanted = request(name, token_count=120, max_output_tokens=8)
        return self._stub.Generate(wanted, timeout=BOUND_S)

    def hang_detail(self) -> str:
        stats = self._stub.CacheStats(messages.CacheStatsRequest(), timeout=BOUND_S)
        return stats.cache.disk.hang_detail

    def assert_serving(self) -> None:
        answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache directory, and what the model says to the prompt in it."""
    folder = tmp_path_factory.mktemp("filled")
    server = ServerProcess(model=model, directory=folder / "blocks", log=folder / "log", options=OPTIONS)
    with server:
        server.wait_until_serving()
        text = Caller(server).generate("cold").text
        server.terminate()
        assert server.wait() == 0
    return folder / "blocks", text


@pytest.mark.parametrize(
    ("break_it", "exit_code", "last_words"),
    [(hang_block_reads, 0, "ssd_hangs"), (hang_store, 1, "stuck_storage_abandoned")],
    ids=["reads", "store"],
)
def test_requests_are_answered_and_the_server_ends(
    model: Path, filled: tuple[Path, str], tmp_path: Path, break_it: Any, exit_code: int, last_words: str
) -> None:
    directory, text = filled
    log = tmp_path / "log"
    server = ServerProcess(model=model, directory=directory, log=log, options=OPTIONS, break_it=break_it)
    with server:
        server.wait_until_serving()
        caller = Caller(server)
        first = caller.generate("first")
        assert first.text == text and first.usage.ssd_tokens == 0
        assert caller.generate("second").text == text
        assert "hang" in caller.hang_detail()
        caller.assert_serving()
        server.terminate()
        assert server.wait() == exit_code
    assert last_words in log.read_text() and "ssd_hangs" in log.read_text()
