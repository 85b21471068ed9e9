"""The key that every client library sends is the same in all of them; tests/system/mesh shows it sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_client import Message, prefix_key

_EXAMPLES = json.loads((Path(__file__).parents[3] / "clients" / "prefix_keys.json").read_text())


@pytest.mark.parametrize("example", _EXAMPLES, ids=[example["key"] for example in _EXAMPLES])
def test_the_examples(example: dict[str, Any]) -> None:
    request = json_format.ParseDict(example["request"], pb.GenerateRequest())
    assert prefix_key(request) == example["key"]


def test_turns_of_one_conversation_have_one_key() -> None:
    turns = [Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Hello")]
    keys = set()
    for count in (2, 3):
        request = pb.GenerateRequest()
        for turn in turns[:count]:
            request.chat.messages.add(role=turn.role, content=turn.content)
        keys.add(prefix_key(request))
    assert len(keys) == 1


def test_what_begins_otherwise_has_another_key() -> None:
    requests = [
        pb.GenerateRequest(text="Once"),
        pb.GenerateRequest(text="Twice"),
        pb.GenerateRequest(text="Once", model="m"),
        pb.GenerateRequest(tokens={"ids": [1]}),
        pb.GenerateRequest(tokens={"ids": [2]}),
    ]
    assert len({prefix_key(request) for request in requests}) == len(requests)
