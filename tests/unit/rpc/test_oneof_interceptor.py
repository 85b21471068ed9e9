"""Finding two fields of one oneof in the bytes of a message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2, sampling_pb2
from icehouse_server.rpc.oneof_interceptor import SCANNED_FIELD_LIMIT, clashing_fields, field_numbers

DESCRIPTOR = messages.GenerateRequest.DESCRIPTOR

PARTS = {
    "text": messages.GenerateRequest(text="x" * 300),
    "chat": messages.GenerateRequest(chat=prompt_pb2.ChatPrompt()),
    "tokens": messages.GenerateRequest(tokens=prompt_pb2.TokenPrompt(ids=[1, 2])),
    "max_output_tokens": messages.GenerateRequest(max_output_tokens=-1),
    "sampling": messages.GenerateRequest(sampling=sampling_pb2.SamplingParams(temperature=0.5, seed=2**63)),
    "stop": messages.GenerateRequest(stop=["a", ""]),
}
PROMPTS = {"text", "chat", "tokens"}


@given(names=st.lists(st.sampled_from(sorted(PARTS)), max_size=6))
def test_a_clash_is_two_different_prompts(names: list[str]) -> None:
    data = b"".join(PARTS[name].SerializeToString() for name in names)
    expected = PROMPTS & set(names)
    assert set(clashing_fields(data, DESCRIPTOR)) == (expected if len(expected) > 1 else set())
    assert {DESCRIPTOR.fields_by_number[number].name for number in field_numbers(data)} == set(names)


def test_fields_of_every_width_are_skipped() -> None:
    fixed32, fixed64 = b"\xa5\x06abcd", b"\xa1\x06abcdefgh"
    data = fixed32 + fixed64 + PARTS["text"].SerializeToString() + PARTS["tokens"].SerializeToString()
    assert clashing_fields(data, DESCRIPTOR) == ("text", "tokens")


def test_work_is_bounded() -> None:
    data = messages.GenerateRequest(stop=[""] * 100_000).SerializeToString()
    assert len(list(field_numbers(data))) == SCANNED_FIELD_LIMIT
