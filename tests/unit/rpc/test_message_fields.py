"""What is refused for its bytes: two fields of one oneof, and more fields than are worth parsing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2, sampling_pb2, tool_pb2
from icehouse_server.errors import InvalidRequest
from icehouse_server.rpc.auth_interceptor import (
    FIELD_LIMIT,
    SCANNED_FIELD_LIMIT,
    check_fields,
    clashing_fields,
    input_of,
)
from icehouse_server.rpc.calls.methods import LONG_MESSAGE_BYTES
from icehouse_server.rpc.rpc_server import pool_with_v1

from tests.fixtures.rpc.worker import METHODS_HERE

DESCRIPTOR = messages.GenerateRequest.DESCRIPTOR

PARTS = {
    "text": messages.GenerateRequest(prompt={"text": "x" * 300}),
    "chat": messages.GenerateRequest(prompt={"chat": prompt_pb2.ChatPrompt()}),
    "tokens": messages.GenerateRequest(prompt={"tokens": prompt_pb2.TokenPrompt(ids=[1, 2])}),
    "max_output_tokens": messages.GenerateRequest(max_output_tokens=-1),
    "sampling": messages.GenerateRequest(sampling=sampling_pb2.SamplingParams(temperature=0.5, seed=2**63)),
    "stop": messages.GenerateRequest(stop=["a", ""]),
}
PROMPTS = {"text", "chat", "tokens"}


@given(names=st.lists(st.sampled_from(sorted(PARTS)), max_size=6))
def test_a_clash_is_two_different_prompts(names: list[str]) -> None:
    data = b"".join(PARTS[name].SerializeToString() for name in names)
    expected = {f"prompt.{name}" for name in PROMPTS & set(names)}
    assert set(clashing_fields(data, DESCRIPTOR)) == (expected if len(expected) > 1 else set())


def test_fields_of_every_width_are_skipped() -> None:
    fixed32, fixed64 = b"\xa5\x06abcd", b"\xa1\x06abcdefgh"
    data = fixed32 + fixed64 + PARTS["text"].SerializeToString() + PARTS["tokens"].SerializeToString()
    assert clashing_fields(data, DESCRIPTOR) == ("prompt.text", "prompt.tokens")


def test_a_oneof_is_not_looked_for_for_ever() -> None:
    many = messages.GenerateRequest(stop=[""] * SCANNED_FIELD_LIMIT).SerializeToString()
    both = PARTS["text"].SerializeToString() + PARTS["tokens"].SerializeToString()
    assert clashing_fields(both + many, DESCRIPTOR) and not clashing_fields(many + both, DESCRIPTOR)


MANY = {
    "short messages": messages.GenerateRequest(
        prompt={"chat": prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(content="a")] * FIELD_LIMIT)}
    ),
    "stop strings": messages.GenerateRequest(stop=["abc"] * FIELD_LIMIT + [""]),
    "tools": messages.GenerateRequest(prompt={"tools": [tool_pb2.Tool(name="t")] * FIELD_LIMIT}),
}


@pytest.mark.parametrize("name", MANY)
def test_a_long_message_of_too_many_fields_is_not_parsed(name: str) -> None:
    data = MANY[name].SerializeToString()
    assert len(data) > LONG_MESSAGE_BYTES
    with pytest.raises(InvalidRequest, match=f"more than {FIELD_LIMIT} fields"):
        check_fields(data, DESCRIPTOR)


def test_long_texts_and_packed_numbers_are_few_fields() -> None:
    turn = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="a" * 2000)
    check_fields(
        messages.GenerateRequest(
            prompt={"chat": prompt_pb2.ChatPrompt(messages=[turn] * 4096)}
        ).SerializeToString(),
        DESCRIPTOR,
    )
    ids = prompt_pb2.TokenPrompt(ids=range(1_000_000))
    check_fields(messages.GenerateRequest(prompt={"tokens": ids}).SerializeToString(), DESCRIPTOR)


def test_every_method_of_the_table_has_its_message_looked_at() -> None:
    pool_with_v1()
    for method in METHODS_HERE:
        assert input_of(method).full_name, method
