"""What the API says of an answer reaches the Python client's caller: no field of it is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from icehouse.v1 import completion_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as inference
from icehouse_client.results import reply_from, started_from, usage_from
from icehouse_client.stream_sum import StreamSum

WITHDRAWN = "withdrawn"
"""Takes a call back."""


def filled(message: Message, field: FieldDescriptor) -> Message:
    """Return the message with a field set, with all that is in it."""
    value: Any = {field.CPPTYPE_STRING: "x", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 1)
    if field.message_type is None:
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
        return message
    part = getattr(message, field.name)
    inner = part.add() if field.is_repeated else part
    inner.SetInParent()
    for each in field.message_type.fields:
        if each.name != WITHDRAWN:
            filled(inner, each)
    return message


def summed(*events: inference.StreamResponse) -> Any:
    total = StreamSum(0)
    for event in (inference.StreamResponse(started=inference.Started()), *events):
        total.add(event)
    return total.reply


def of_started(message: Any) -> Any:
    return (
        started_from(message),
        summed(
            inference.StreamResponse(started=message), inference.StreamResponse(finished=inference.Finished())
        ),
    )


def of_delta(message: Any) -> Any:
    ended = inference.StreamResponse(finished=inference.Finished())
    return summed(inference.StreamResponse(delta=message), ended)


def of_finished(message: Any) -> Any:
    return summed(inference.StreamResponse(finished=message))


def of_completion(message: Any) -> Any:
    return reply_from(inference.GenerateResponse(completions=[message]))


NOT_TOLD = {
    "icehouse.v1.Delta.completion_index": "whose it is",
    "icehouse.v1.Finished.completion_index": "whose it is",
    "icehouse.v1.Completion.index": "its place in the list",
    "icehouse.v1.Completion.cache": "its counts are in its usage, and the limit is the first one's",
}
READERS: list[tuple[type[Message], Callable[[Any], Any]]] = [
    (inference.GenerateResponse, reply_from),
    (completion_pb2.Completion, of_completion),
    (inference.Started, of_started),
    (inference.Delta, of_delta),
    (inference.Finished, of_finished),
    (usage_pb2.Usage, usage_from),
]


@pytest.mark.parametrize(
    ("kind", "read", "field"),
    [
        pytest.param(kind, read, field, id=field.full_name)
        for kind, read in READERS
        for field in kind.DESCRIPTOR.fields
        if field.full_name not in NOT_TOLD
    ],
)
def test_a_field_of_an_answer_is_told(
    kind: type[Message], read: Callable[[Any], Any], field: FieldDescriptor
) -> None:
    assert read(filled(kind(), field)) != read(kind())
