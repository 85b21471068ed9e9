"""The Python client against the real edge and a scripted engine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

CLIENT_SOURCE = Path(__file__).parents[2] / "clients" / "python" / "src"

# At the end: gen/python stays the place where icehouse.v1 comes from.
if str(CLIENT_SOURCE) not in sys.path:
    sys.path.append(str(CLIENT_SOURCE))

from tests.rpc.conftest import House, running_house  # noqa: E402


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with running_house() as started:
        yield started
