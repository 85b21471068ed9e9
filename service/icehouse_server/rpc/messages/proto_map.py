"""Map from dataclasses of counters to protobuf messages, by field name. Pure functions.

`_s` becomes a Duration, `_per_s` becomes `_per_second`, `_token_count` and `_token_limit` become `_tokens`, a
time becomes a Timestamp. Enums are mapped by member name, None is absent, bytes are hexadecimal text,
dataclasses are messages, tuples are repeated fields. The few exceptions are listed here; a test compares the
fields of both sides.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from icehouse_server.domain.cache_stats import CacheStats, LookupStats
from icehouse_server.domain.model import ModelInfo

M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=enum.Enum)

RENAMED = {
    "model_id": "id",
    "fingerprint_hex": "fingerprint",
    "sees_images": "reads_images",
    "embedding_size": "embedding_dimensions",
    "is_encrypted": "encrypted",
    "is_compressing": "compressing",
    "start_token_index": "start_token",
    "decode_step_p50_s": "decode_step_duration_p50",
    "decode_step_p99_s": "decode_step_duration_p99",
    "pass_p50_s": "pass_duration_p50",
    "pass_p99_s": "pass_duration_p99",
    "image_encode_s": "image_encode_duration",
}
DERIVED: dict[type[Any], tuple[str, ...]] = {LookupStats: ("miss_token_total",)}
"""Properties that have a field in the message too."""
NOT_SENT: dict[type[Any], tuple[str, ...]] = {
    # A tenant's share is sent with its other numbers.
    CacheStats: ("tenants",),
    ModelInfo: ("image_refusal", "system_digest_hex", "pooling"),
}
"""Fields that the message lacks."""
_SUFFIXES = (("_per_s", "_per_second"), ("_token_count", "_tokens"), ("_token_limit", "_tokens"), ("_s", ""))


def duration_proto(duration_s: float) -> Duration:
    """Return seconds as a Duration, to the nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(duration_s * 1e9))
    return duration


def timestamp_proto(time_s: float) -> Timestamp:
    """Return seconds since the Unix epoch as a Timestamp, to the microsecond."""
    timestamp = Timestamp()
    timestamp.FromMicroseconds(round(time_s * 1e6))
    return timestamp


def names_of(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of each field that is sent: in the dataclass, and in the message."""
    own = (field.name for field in dataclasses.fields(kind) if field.name not in NOT_SENT.get(kind, ()))
    for name in (*own, *DERIVED.get(kind, ())):
        ending = next((pair for pair in _SUFFIXES if name.endswith(pair[0])), ("", ""))
        yield name, RENAMED.get(name) or name.removesuffix(ending[0]) + ending[1]


def to_proto(value: Any, kind: type[M]) -> M:
    """Return a dataclass as a message."""
    return fill(kind(), value)


def fill(message: M, value: Any) -> M:
    """Set every field of a dataclass in a message, which may have further fields, and return the message."""
    for name, proto_name in names_of(type(value)):
        item = getattr(value, name)
        field: Any = message.DESCRIPTOR.fields_by_name[proto_name]
        if item is None:
            continue
        if isinstance(item, tuple) and field.message_type is None:
            getattr(message, proto_name).extend(_scalar(each, field) for each in item)
        elif isinstance(item, tuple):
            for each in item:
                fill(getattr(message, proto_name).add(), each)
        elif dataclasses.is_dataclass(item):
            target = getattr(message, proto_name)
            target.SetInParent()
            fill(target, item)
        elif field.message_type is not None:
            make = duration_proto if field.message_type is Duration.DESCRIPTOR else timestamp_proto
            getattr(message, proto_name).CopyFrom(make(item))
        else:
            setattr(message, proto_name, _scalar(item, field))
    return message


def _scalar(value: Any, field: Any) -> Any:
    if isinstance(value, enum.Enum):
        values = field.enum_type
        return values.values_by_name[_prefix(values) + value.name].number
    return value.hex() if isinstance(value, bytes) else value


def enum_proto(member: enum.Enum, kind: Any) -> Any:
    """Return the value of a message's enum that has the member's name."""
    return kind.Value(_prefix(kind.DESCRIPTOR) + member.name)


def enum_of(value: int, kind: Any, members: type[E], *, unset: E) -> E | None:
    """Return the member that a message's enum value names, `unset` if it is unspecified.

    None for a value that only a newer API has.
    """
    found = kind.DESCRIPTOR.values_by_number.get(value)
    if found is None:
        return None
    return members[found.name.removeprefix(_prefix(kind.DESCRIPTOR))] if value else unset


def _prefix(values: EnumDescriptor) -> str:
    """Return the common prefix of the names of an enum's values."""
    return values.values_by_number[0].name.removesuffix("UNSPECIFIED")
