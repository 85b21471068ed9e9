"""Scenarios of clients/scenarios.json for the tests of their names, against servers that run already."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator

import pytest
from icehouse_client import Client

from clients.python.tests.scenario import Scenario


@pytest.fixture
def scenario(request: pytest.FixtureRequest) -> Scenario:
    """Return the entry that the test is named after."""
    line = os.environ.get("ICEHOUSE_TEST_SERVERS")
    if not line:
        pytest.skip("ICEHOUSE_TEST_SERVERS names no servers; `make test-clients` starts them")
    found = Scenario.of(request.function.__name__.removeprefix("test_"), servers=json.loads(line))
    if not found.address:
        pytest.skip("its server could not be started; `make test-clients` says why")
    return found


@pytest.fixture
def client(scenario: Scenario) -> Iterator[Client]:
    """Return a client of the scenario's server."""
    with Client(scenario.address) as made:
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append what a scenario came to to the file that ICEHOUSE_TEST_RESULTS names."""
    report = yield
    path = os.environ.get("ICEHOUSE_TEST_RESULTS")
    if path and (report.when == "call" or report.failed):
        result = {"scenario": item.name.removeprefix("test_"), "passed": report.passed}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return report
