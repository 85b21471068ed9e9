"""The Python client against the real edge and a scripted engine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

CLIENT_SOURCE = Path(__file__).parents[3] / "clients" / "python" / "src"

# At the end: gen/python stays the place where icehouse.v1 comes from.
if str(CLIENT_SOURCE) not in sys.path:
    sys.path.append(str(CLIENT_SOURCE))

from tests.unit.rpc.conftest import RunningServer, running  # noqa: E402


@pytest.fixture
async def served() -> AsyncIterator[RunningServer]:
    async with running() as started:
        yield started
