"""Servers behind the front: one whose engine is scripted, and whole ones with a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.whole_server import whole_server
from tests.unit.rpc.conftest import RunningServer, running


@pytest.fixture
async def served() -> AsyncIterator[RunningServer]:
    """A server whose engine does what the test says."""
    async with running() as started:
        yield started


@pytest.fixture
async def front(served: RunningServer) -> AsyncIterator[HttpFront]:
    async with front_of(served.server.address) as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture
async def whole(model, tmp_path) -> AsyncIterator[HttpFront]:
    """A front of a whole server with a tiny model of random weights and a cache of small blocks."""
    options = {"block_token_count": 16, "min_prefix_token_count": 0, "restore_or_recompute": False}
    settings = {f"cache__{name}": value for name, value in options.items()}
    async with (
        whole_server(model, tmp_path / "blocks", **settings) as server,
        front_of(server.served.rpc.address) as started,
    ):
        yield started
