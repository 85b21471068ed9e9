"""Scenarios of clients/scenarios.json through the HTTP front, for the tests of their names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from clients.http.tests.fronts import HttpFront, front_of
from clients.python.tests.conftest import pytest_runtest_makereport, scenario
from clients.python.tests.scenario import Scenario

__all__ = ["pytest_runtest_makereport", "scenario"]


@pytest.fixture
async def front(scenario: Scenario) -> AsyncIterator[HttpFront]:
    """A front of the scenario's server."""
    async with front_of(scenario.address) as started:
        yield started
