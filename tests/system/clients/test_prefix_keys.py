"""The key that every client library sends is the same in all of them; tests/system/mesh shows it sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_client import Message, prefix_key
from icehouse_client.requests import generate_request

_EXAMPLES = json.loads((Path(__file__).parents[3] / "clients" / "prefix_keys.json").read_text())


def message_of(example: dict[str, Any]) -> Any:
    kind = message_factory.GetMessageClass(
        descriptor_pool.Default().FindMessageTypeByName(f"icehouse.v1.{example['message']}")
    )
    return json_format.ParseDict(example["request"], kind())


@pytest.mark.parametrize("example", _EXAMPLES, ids=[f"{e['message']}-{e['key']}" for e in _EXAMPLES])
def test_the_examples(example: dict[str, Any]) -> None:
    assert prefix_key(message_of(example)) == example["key"]


def test_every_message_with_a_prompt_that_is_cached_has_an_example() -> None:
    pool = descriptor_pool.Default()
    files = ("inference", "cache", "rerank")
    requests = {
        method.input_type.name
        for file in files
        for service in pool.FindFileByName(f"icehouse/v1/{file}_service.proto").services_by_name.values()
        for method in service.methods
        if "cache" in (names := {field.name for field in method.input_type.fields})
        and names & {"prompt", "query"}
    }
    assert {example["message"] for example in _EXAMPLES} == requests


def chat(**fields: Any) -> pb.GenerateRequest:
    turn = {"role": "ROLE_USER", "content": "Hi"}
    return pb.GenerateRequest(prompt={"chat": {"messages": [turn]}, **fields})


def test_what_computes_other_kv_has_another_key() -> None:
    requests = [
        chat(),
        chat(adapter="sql"),
        chat(tools=[{"name": "a"}]),
        chat(tools=[{"name": "a", "parameters_json": "{}"}]),
        chat(tools=[{"name": "a"}, {"name": "b"}]),
        chat(tools=[{"name": "a"}], adapter="sql"),
    ]
    assert len({prefix_key(request) for request in requests}) == len(requests)


def test_a_text_in_parts_is_the_same_text() -> None:
    keys = set()
    for turn in ({"content": "Be kind."}, {"parts": [{"text": "Be "}, {"text": "kind."}]}):
        request = pb.GenerateRequest()
        request.prompt.chat.messages.add(role="ROLE_USER", **turn)
        keys.add(prefix_key(request))
    other = pb.GenerateRequest()
    other.prompt.chat.messages.add(role="ROLE_USER", parts=[{"text": "Cook."}])
    assert len(keys) == 1 and prefix_key(other) not in keys


def test_turns_of_one_conversation_have_one_key() -> None:
    turns = [Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Hello")]
    keys = set()
    for count in (2, 3):
        keys.add(prefix_key(generate_request(turns[:count], {})))
    assert len(keys) == 1


def test_a_role_of_the_templates_own_counts_by_its_name() -> None:
    keys = {prefix_key(generate_request([Message(role, "2")], {})) for role in ("ipython", "critic", "tool")}
    assert len(keys) == 3


def test_what_begins_otherwise_has_another_key() -> None:
    requests = [
        pb.GenerateRequest(prompt={"text": "Once"}),
        pb.GenerateRequest(prompt={"text": "Twice"}),
        pb.GenerateRequest(prompt={"text": "Once"}, model="m"),
        pb.GenerateRequest(prompt={"tokens": {"ids": [1]}}),
        pb.GenerateRequest(prompt={"tokens": {"ids": [2]}}),
    ]
    assert len({prefix_key(request) for request in requests}) == len(requests)
