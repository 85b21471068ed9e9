"""Counting a message's fields in its bytes, and nothing else of what they may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2
from icehouse_server.rpc.auth_interceptor import Field, fields, has_more_fields

DESCRIPTOR = messages.GenerateRequest.DESCRIPTOR
TURN = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="Hi")


def count_of(data: bytes, *, most: int = 10_000) -> int:
    """The count, by what is more than each limit."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if has_more_fields(data, DESCRIPTOR, limit=middle) else (low, middle)
    return low


@given(
    turn_count=st.integers(0, 40), stop=st.lists(st.text(max_size=5), max_size=5), limit=st.integers(0, 200)
)
def test_fields_of_messages_in_messages_count(turn_count: int, stop: list[str], limit: int) -> None:
    chat = prompt_pb2.ChatPrompt(messages=[TURN] * turn_count)
    data = messages.GenerateRequest(
        prompt={"chat": chat}, stop=stop, max_output_tokens=300
    ).SerializeToString()
    count = 2 + 3 * turn_count + len(stop) + 1
    assert has_more_fields(data, DESCRIPTOR, limit=limit) is (count > limit)
    assert count_of(data) == count


def test_texts_are_not_looked_into() -> None:
    inside = messages.GenerateRequest(
        prompt={"chat": prompt_pb2.ChatPrompt(messages=[TURN] * 9)}
    ).SerializeToString()
    text = messages.GenerateRequest(prompt={"text": inside.decode("latin-1")})
    assert count_of(text.SerializeToString()) == 2


def test_what_nobody_knows_counts_too() -> None:
    varint, fixed64, fixed32, text = (
        b"\xf8\x3e\x80\x01",
        b"\xf9\x3e" + bytes(8),
        b"\xfd\x3e" + bytes(4),
        b"\xfa\x3e\x01a",
    )
    group = b"\xfb\x3e" + varint + b"\xfc\x3e"
    assert count_of(varint + fixed64 + fixed32 + text) == 4
    assert count_of(group) == 3


def test_where_each_field_is() -> None:
    data = messages.GenerateRequest(model="abc", max_output_tokens=5).SerializeToString()
    found = {DESCRIPTOR.fields_by_number[field.number].name: field for field in fields(data, 0, len(data))}
    text, limit = found["model"], found["max_output_tokens"]
    assert (data[text.start : text.stop], text.is_delimited) == (b"abc", True)
    assert (data[limit.start : limit.stop], limit.is_delimited) == (b"\x05", False)
    assert isinstance(text, Field)


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_message_are_left_to_the_parser(data: bytes) -> None:
    assert count_of(data) <= len(data)


def test_a_number_that_never_ends_is_not_added_up() -> None:
    for endless in (b"\xff" * (16 << 20), b"\x0a" + b"\x80" * (16 << 20)):
        assert count_of(endless) == 0
    assert count_of(b"\x08" + b"\xff" * 9 + b"\x01") == 1


@given(cut=st.integers(1, 30))
def test_a_cut_message_ends_where_it_is_cut(cut: int) -> None:
    data = messages.GenerateRequest(
        prompt={"chat": prompt_pb2.ChatPrompt(messages=[TURN] * 3)}
    ).SerializeToString()
    assert count_of(data[:-cut]) == 0
