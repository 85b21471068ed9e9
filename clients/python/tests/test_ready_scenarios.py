"""The scenarios of waiting for a server with the Python client."""

from __future__ import annotations

import pytest
from icehouse.v1.server_service_pb2 import ServerState
from icehouse_client import Client, IcehouseClientError

from clients.python.tests.scenario import Scenario


def test_wait_ready(scenario: Scenario, client: Client) -> None:
    assert_ready(scenario, client)


def test_wait_ready_coming(scenario: Scenario, client: Client) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        list(client.stream(scenario.text, max_output_tokens=scenario.input["max_output_tokens"]))
    assert_refused(caught.value, scenario)
    assert_ready(scenario, client)


def test_wait_ready_absent(scenario: Scenario, client: Client) -> None:
    assert_late(scenario, client)


def test_wait_ready_loading(scenario: Scenario, client: Client) -> None:
    assert_late(scenario, client)


def assert_ready(scenario: Scenario, client: Client) -> None:
    server = client.wait_until_serving(timeout_s=timeout_s(scenario))
    assert ServerState.Name(server.state) == f"SERVER_STATE_{scenario.expect['state']}"


def assert_late(scenario: Scenario, client: Client) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        client.wait_until_serving(timeout_s=timeout_s(scenario))
    assert_refused(caught.value, scenario)
    assert scenario.expect["message_part"] in caught.value.message
    assert (caught.value.metadata, caught.value.field, caught.value.retry_after_s) == ({}, None, None)


def assert_refused(error: IcehouseClientError, scenario: Scenario) -> None:
    assert (error.code.name, error.reason) == (scenario.expect["code"], scenario.expect["reason"])


def timeout_s(scenario: Scenario) -> float:
    return float(scenario.input["timeout_ms"]) / 1000
