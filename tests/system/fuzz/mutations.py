"""Mutations of request messages: good ones made by reflection, then spoiled as messages and as bytes.

All is drawn from one generator of random numbers, so that a seed gives the same bytes again.
"""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal import encoder
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from icehouse.v1 import prompt_pb2

from tests.fixtures.image_files import SHOWN, drawn_file, drawn_uri
from tests.system.fuzz import values

_DEPTH_LIMIT = 6
_BYTE_LIMIT = 256 << 10
"""Of what one mutation makes of a repeated field."""

_BAD_UTF8 = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80")
_LENGTH = 2
"""The wire type of messages, texts and bytes."""


def good(descriptor: Descriptor, rng: random.Random, depth: int = 0) -> Message:
    """Return a message that a caller might well send: mostly one of each oneof, some of the other fields."""
    message = GetMessageClass(descriptor)()
    oneofs, others = _plan(descriptor)
    chosen = [rng.choice(fields) for fields in oneofs if rng.random() < 0.97]
    for field in others:
        likely = 0.97 if field.name in values.USUAL else 0.1 if depth == 0 else 0.05
        if rng.random() < likely:
            chosen.append(field)
    for field in chosen:
        if depth < _DEPTH_LIMIT:
            _fill(message, field, rng, depth)
    return message


def add_images(message: Any, rng: random.Random, *, are_whole: bool = False) -> None:
    """Make the prompt of a request that may have a conversation one with images between texts, which a model
    that sees has no reason to refuse if `are_whole`."""
    role = prompt_pb2.ROLE_USER if are_whole or rng.random() < 0.97 else prompt_pb2.ROLE_TOOL
    turn = message.prompt.chat.messages.add(role=role)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        image = turn.parts.add().image
        if rng.random() < 0.2:
            image.detail = rng.randrange(4)
        if not are_whole and rng.random() < 0.3:
            image.uri = drawn_uri(rng)
        else:
            drawn = rng.choice(SHOWN) if are_whole else drawn_file(rng)
            image.data, image.media_type = drawn.data, drawn.media_type
        if rng.random() < 0.5:
            turn.parts.add(text=rng.choice(("what is it?", "\n", "\n" if are_whole else "<image>")))


def add_tensors(message: Any, rng: random.Random, *, token_id: int, side: int, tile_tokens: int) -> None:
    """Make a gateway's request one with images that it has prepared, in tiles; nearly right, mostly."""
    ids = [rng.randrange(token_id) for _ in range(rng.choice((1, 5, 30)))]
    counts = [rng.choice((1, 2, 5))] * rng.choice((1, 1, 2, 3))
    inputs = message.mm_inputs
    inputs.Clear()
    for count in counts:
        start = len(ids)
        for _ in range(count):
            ids += [*[token_id] * tile_tokens, rng.randrange(token_id)]
        inputs.mm_placeholders.add(offset=start, length=len(ids) - start)
    message.tokenized.input_ids[:] = ids
    pixels = inputs.pixel_values
    pixels.shape.extend((len(counts), counts[0], 3, side, side))
    pixels.dtype = rng.choices(("float32", "bfloat16", "int64", "x"), (90, 4, 3, 3))[0]
    # Numbers near 0, and every now and then the bits of one that no image has.
    size = len(counts) * counts[0] * 3 * side**2
    pixels.inline = (
        struct.pack("<f", rng.choice((0.0, 1e-40, *(rng.uniform(-3, 3) for _ in range(8))))) * size
    )
    if rng.random() < 0.1:
        pixels.inline = pixels.inline[:-4] + rng.randbytes(4)
    if rng.random() < 0.3:
        inputs.im_token_id = rng.choice((token_id, token_id, 0))


def parsed(descriptor: Descriptor, data: bytes) -> Any | None:
    """Return the message that the bytes are, None where they are none."""
    try:
        return GetMessageClass(descriptor).FromString(data)
    except DecodeError:
        return None


def spoil(message: Message, rng: random.Random) -> None:
    """Change one thing in a message or anywhere below it, as far as the message can hold it."""
    nodes = list(_nodes(message))
    node = rng.choice(nodes)
    fields: Sequence[FieldDescriptor] = list(node.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    kind = rng.random()
    if kind < 0.15:
        node.ClearField(field.name)
    elif kind < 0.3:
        _fill(node, field, rng, 2)
    elif kind < 0.45 and field.is_repeated and not _is_map(field):
        _grow(getattr(node, field.name), rng)
    else:
        _set_odd(node, field, rng)


def nested(descriptor: Descriptor, rng: random.Random) -> bytes:
    """Return bytes of fields that lie in each other deeper than anybody means; of a message that has no such
    fields, of groups that it does not know."""
    depth = rng.choice((20, 90, 101, 500, 5000))
    cycles = _cycles(descriptor)
    if not cycles or rng.random() < 0.2:
        return b"\x0b" * depth + (b"\x0c" * depth if rng.random() < 0.5 else b"")
    head, cycle = rng.choice(cycles)
    data = b""
    for field in reversed((*head, *cycle * (depth // len(cycle)))):
        if len(data) > _BYTE_LIMIT:
            break
        data = encoder.TagBytes(field.number, _LENGTH) + _varint(len(data)) + data
    return data


def clash(descriptor: Descriptor, rng: random.Random) -> bytes:
    """Return bytes that set every member of a oneof after each other, of the message or else of its prompt;
    nothing where there is none."""
    oneofs, _ = _plan(descriptor)
    prompt = descriptor.fields_by_name.get("prompt")
    if not oneofs and prompt is not None and prompt.message_type is not None:
        inside = clash(prompt.message_type, rng)
        return encoder.TagBytes(prompt.number, _LENGTH) + _varint(len(inside)) + inside
    if not oneofs:
        return b""
    data = b""
    for field in rng.choice(oneofs):
        message = GetMessageClass(descriptor)()
        _fill(message, field, rng, 0)
        data += message.SerializeToString()
    return data


def unknown(rng: random.Random) -> bytes:
    """Return bytes of fields that no message has, of every wire type."""
    data = b""
    for _ in range(rng.choice((1, 3, 200))):
        kind = rng.randrange(8)
        number = rng.choice((0, 19, 5000, 19_000, (1 << 29) - 1))
        tail = {
            0: _varint(rng.getrandbits(64)),
            1: rng.randbytes(8),
            2: _varint(3) + b"abc",
            5: rng.randbytes(4),
        }
        data += _varint(number << 3 | kind) + tail.get(kind, b"")
    return data


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few of them flipped, lost, doubled, put in, or cut off."""
    held = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randint(0, len(held))
        end = min(len(held), at + rng.randint(0, 6))
        match rng.randrange(7):
            case 0 | 1 if at < len(held):
                held[at] ^= 1 << rng.randrange(8)
            case 2:
                del held[at:end]
            case 3:
                held[at:at] = held[at:end]
            case 4:
                del held[at:]
            case 5:
                held[at:end] = rng.choice(
                    (*_BAD_UTF8, _varint((1 << 64) - 1), _varint(1 << 31), b"\xff" * 10)
                )
            case _:
                held[at:at] = rng.randbytes(rng.randint(1, 4))
    return bytes(held)


def _fill(message: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    """Give a field a good value, or a few."""
    count = rng.choice((1, 1, 2, 3)) if field.is_repeated else 1
    if field.name in ("ids", "token_ids") and field.is_repeated:
        count = rng.choice((1, 8, 40))
    held = getattr(message, field.name)
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(count):
            if value.message_type is not None:
                held[values.good(key, rng)].CopyFrom(good(value.message_type, rng, depth + 1))
            else:
                held[values.good(key, rng)] = values.good(value, rng)
    elif field.message_type is not None:
        for _ in range(count):
            made = good(field.message_type, rng, depth + 1)
            (held.add() if field.is_repeated else held).CopyFrom(made)
        if not field.is_repeated:
            held.SetInParent()
    elif field.is_repeated:
        held.extend(values.good(field, rng) for _ in range(count))
    else:
        setattr(message, field.name, values.good(field, rng))


def _set_odd(message: Any, field: FieldDescriptor, rng: random.Random) -> None:
    held = getattr(message, field.name)
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(rng.choice((1, 1, 3, 1500))):
            if value.message_type is not None:
                held[values.odd(key, rng)].SetInParent()
            else:
                held[values.odd(key, rng)] = values.odd(value, rng)
    elif field.message_type is not None:
        (held.add() if field.is_repeated else held).SetInParent()
    elif field.is_repeated:
        held.extend([values.odd(field, rng)] * rng.choice((1, 1, 3)))
    else:
        setattr(message, field.name, values.odd(field, rng))


def _grow(held: Any, rng: random.Random) -> None:
    """Repeat what a repeated field holds."""
    if not held:
        return
    first = held[0]
    size = (
        first.ByteSize()
        if isinstance(first, Message)
        else len(first)
        if isinstance(first, str | bytes)
        else 4
    )
    count = min(rng.choice((2, 20, 200, 5000)), _BYTE_LIMIT // (size + 1))
    held.extend([first] * count)


def _nodes(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or _is_map(field):
            continue
        for child in value if field.is_repeated else (value,):
            yield from _nodes(child)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


@functools.cache
def _plan(
    descriptor: Descriptor,
) -> tuple[tuple[tuple[FieldDescriptor, ...], ...], tuple[FieldDescriptor, ...]]:
    """Return the members of each oneof, and the fields of none."""
    oneofs = tuple(tuple(oneof.fields) for oneof in descriptor.oneofs if len(oneof.fields) > 1)
    members = {field.number for fields in oneofs for field in fields}
    return oneofs, tuple(field for field in descriptor.fields if field.number not in members)


Path = tuple[FieldDescriptor, ...]


@functools.cache
def _cycles(descriptor: Descriptor) -> tuple[tuple[Path, Path], ...]:
    """Return ways into messages that can hold themselves: the fields to the first one, and once around."""
    found: list[tuple[Path, Path]] = []

    def visit(at: Descriptor, path: Path, seen: tuple[Descriptor, ...]) -> None:
        if at in seen:
            start = seen.index(at)
            found.append((path[:start], path[start:]))
            return
        for field in at.fields:
            if field.message_type is not None:
                visit(field.message_type, (*path, field), (*seen, at))

    visit(descriptor, (), ())
    return tuple(found)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
