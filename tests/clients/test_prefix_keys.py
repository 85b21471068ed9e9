"""The key that every client library sends is the same in all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_client import PREFIX_KEY_HEADER, Message, prefix_key

from tests.clients.test_python_client import threaded
from tests.rpc.conftest import House

_EXAMPLES = json.loads((Path(__file__).parents[2] / "clients" / "prefix_keys.json").read_text())


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


async def test_the_key_goes_with_each_prompt(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    send = grpc._channel._UnaryUnaryMultiCallable.__call__

    def spy(self: Any, request: Any, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        seen.extend(value for key, value in metadata or () if key == PREFIX_KEY_HEADER)
        return send(self, request, *args, metadata=metadata, **kwargs)

    monkeypatch.setattr(grpc._channel._UnaryUnaryMultiCallable, "__call__", spy)
    await threaded(house, lambda client: client.generate("Hi", max_output_tokens=1))
    assert seen == [prefix_key(pb.GenerateRequest(text="Hi"))]
