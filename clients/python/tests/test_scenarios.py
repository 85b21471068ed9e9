"""Each scenario of clients/scenarios.json with the Python client."""

from __future__ import annotations

from icehouse_client import Client

from clients.python.tests.scenario import Scenario


def test_unary(scenario: Scenario, client: Client) -> None:
    reply = client.generate(scenario.text, max_output_tokens=scenario.input["max_output_tokens"])
    assert reply.usage.output_tokens == len(reply.token_ids) == scenario.expect["output_tokens"]
    assert reply.finish_reason.name == scenario.expect["finish_reason"]
    assert reply.model == scenario.servers["model"]


def test_stream(scenario: Scenario, client: Client) -> None:
    options = {"max_output_tokens": scenario.input["max_output_tokens"]}
    whole = client.generate(scenario.text, **options)
    stream = client.stream(scenario.text, **options)
    assert "".join(stream) == whole.text == stream.reply.text
    assert stream.reply.token_ids == whole.token_ids
    assert stream.reply.usage.output_tokens == scenario.expect["output_tokens"]
    assert stream.reply.finish_reason.name == scenario.expect["finish_reason"]
