"""JSON of the API's messages for programs: protobuf's own mapping, with the protos' names.

64-bit numbers are strings and durations such as "1.5s", as grpcurl and gateways show them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message


def message_facts(message: Message) -> dict[str, Any]:
    """Return a message as JSON has it: what is absent is left out, what is zero is not."""
    facts = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert isinstance(facts, dict), "a message is an object"
    return facts
