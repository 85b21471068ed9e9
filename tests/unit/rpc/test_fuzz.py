"""Whatever bytes a caller sends, the answer is a status of ours and the server goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from icehouse.v1 import inference_service_pb2, prompt_pb2
from icehouse_server.domain.chat import ImageSource, ImageTexts
from icehouse_server.domain.events import Delta, Event
from icehouse_server.domain.ids import ImageDigest
from icehouse_server.domain.request import GenerationRequest, ImageSpan, Logprob, TokenLogprobs
from icehouse_server.errors import Reason
from icehouse_server.rpc.rpc_server import pool_with_v1

from docs.reasons import REASONS
from tests.fixtures.image_files import drawn_file, drawn_uri
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import finished, started
from tests.fixtures.rpc.worker import METHODS_HERE, worker_parts
from tests.unit.rpc.conftest import RunningServer, running
from tests.unit.rpc.services.test_embedding_service import EMBEDDING

_POOL: Any = pool_with_v1()
METHODS = {
    f"/{name}": _POOL.FindServiceByName(service).methods_by_name[method]
    for name in METHODS_HERE
    for service, _, method in [name.partition("/")]
}
"""Every RPC that the server offers: `test_methods` proves that the table has them all."""

_OURS = ("/icehouse.", "/vllm.")
IMAGE_METHODS = (
    "/icehouse.v1.InferenceService/Generate",
    "/icehouse.v1.InferenceService/Tokenize",
    "/icehouse.v1.CacheService/Explain",
)

DEPTH_LIMIT = 4
ITEM_LIMIT = 3
CALL_TIMEOUT_S = 20
EXAMPLE_COUNT = 150

REAL_EDGES = (0.0, -1.0, 1.0, math.inf, -math.inf, math.nan, 1e-45, 3e38)
EDGES = (0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**32 - 1, 2**64 - 1)
WORDS = (
    "",
    "Hi",
    "user",
    "assistant",
    "tiny",
    "ä\U0001f600\0",
    "{" * 40,
    '{"type":"object"}',
    "y",
    "{query}{document}",
    "a" * 3000,
    "/etc",
)

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def brief(request: GenerationRequest) -> list[Event]:
    """Script: an answer with no more output than what was asked to be told of it."""
    if request.pooling is not None:
        return [started(request), dataclasses.replace(finished(request), embedding=np.ones(4, np.float32))]
    if request.logprobs is not None and request.logprobs.token_ids:
        asked = tuple(Logprob(token_id, -1.0) for token_id in request.logprobs.token_ids)
        told = Delta("", (5,), (TokenLogprobs(5, -1.0, 1, (), asked),))
        return [started(request), told, finished(request, output_token_count=1)]
    return [started(request), finished(request)]


@dataclasses.dataclass(frozen=True)
class DecodedImages:
    """Images that were decoded as ever, and take no tokens of a prompt."""

    texts: ImageTexts
    pixel_bytes: tuple[()] = ()

    def read_next(self) -> int:
        raise AssertionError("all were read when they were opened")

    def spans(self, token_ids: Sequence[int]) -> tuple[ImageSpan, ...]:
        return ()


class ImageDecoder:
    """Reads images for a model that does nothing with them."""

    def __init__(self, decode: Callable[[ImageSource], object]) -> None:
        self._decode = decode

    def open(self, sources: Sequence[ImageSource]) -> DecodedImages:
        for source in sources:
            self._decode(source)
        return DecodedImages(ImageTexts("<image>", ("",) * len(sources), (ImageDigest(b""),) * len(sources)))


def image_decoder() -> ImageDecoder | None:
    """Return the server's own decoding, None where Pillow is not installed."""
    if importlib.util.find_spec("PIL") is None:
        return None
    from icehouse_server.vision.decoder import ImageLimits, decode_image

    limits = ImageLimits(image_count=4, size_bytes=100_000, pixel_count=4_000_000, prepared_bytes=1 << 20)
    return ImageDecoder(lambda source: decode_image(source, limits))


class Target:
    """A server with an event loop of its own, and a plain channel to it."""

    def __init__(self, served: RunningServer, channel: grpc.Channel) -> None:
        self.served = served
        self.channel = channel

    def call(self, path: str, data: bytes) -> grpc.RpcError | None:
        """Send bytes and read a few answers; return the status's error, None for OK or an endless stream."""
        try:
            if not METHODS[path].server_streaming:
                self.channel.unary_unary(path)(data, timeout=CALL_TIMEOUT_S)
                return None
            answers: Any = self.channel.stream_stream(path)(iter([data]), timeout=CALL_TIMEOUT_S)
            for count, _ in enumerate(answers):
                if count == 2 or "Watch" in path:
                    answers.cancel()
                    return None
        except grpc.RpcError as error:
            return error
        return None

    def is_serving(self) -> bool:
        """Whether health says so and a good request is answered."""
        check: Any = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check", response_deserializer=health_pb2.HealthCheckResponse.FromString
        )
        status = check(b"", timeout=CALL_TIMEOUT_S).status
        good = inference_service_pb2.GenerateRequest(
            prompt={"text": "Hi"}, max_output_tokens=1
        ).SerializeToString()
        error = self.call("/icehouse.v1.InferenceService/Generate", good)
        return bool(status == health_pb2.HealthCheckResponse.SERVING and error is None)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    ready, done = threading.Event(), threading.Event()
    held: list[RunningServer] = []

    async def serve() -> None:
        images = image_decoder()
        info = dataclasses.replace(EMBEDDING, sees_images=images is not None)
        async with running(info=info, images=images, channelz_enabled=True, worker=worker_parts()) as served:
            served.engine.script = brief
            held.append(served)
            ready.set()
            while not done.is_set():
                await asyncio.to_thread(done.wait, 1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(BOUND_S)
    with grpc.insecure_channel(held[0].server.address) as channel:
        yield Target(held[0], channel)
        done.set()
        thread.join(BOUND_S)
    assert not thread.is_alive()


def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        edges = [edge for edge in EDGES if low <= edge <= high]
        return st.sampled_from(edges) | st.integers(low, high)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=20)
        return st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    return st.sampled_from(REAL_EDGES) | st.floats(width=32)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Draw a message that the parser takes: some fields, with values at and beyond every edge."""
    message = GetMessageClass(descriptor)()
    fields = list(descriptor.fields)
    chosen = []
    if fields:
        chosen = draw(st.lists(st.sampled_from(fields), unique_by=lambda field: field.number, max_size=5))
    for field in chosen:
        count = draw(st.integers(0, ITEM_LIMIT)) if field.is_repeated else 1
        if field.message_type is not None and depth >= DEPTH_LIMIT:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        for _ in range(count):
            fill(draw, message, field, depth)
    return message


def fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    """Set or append one drawn value."""
    held = getattr(message, field.name)
    if field.message_type is not None:
        drawn = draw(messages(field.message_type, depth + 1))
        (held.add() if field.is_repeated else held).CopyFrom(drawn)
    elif field.is_repeated:
        held.append(draw(scalar(field)))
    else:
        setattr(message, field.name, draw(scalar(field)))


@st.composite
def damaged(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """Draw a good message's bytes with a few of them changed, lost, doubled or put in."""
    data = bytearray(draw(messages(descriptor)).SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 6)))
        match draw(st.sampled_from(("flip", "lose", "double", "insert"))):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "lose":
                del data[at:end]
            case "double":
                data[at:at] = data[at:end]
            case _:
                data[at:at] = draw(st.binary(min_size=1, max_size=4))
    return bytes(data)


def calls() -> st.SearchStrategy[tuple[str, bytes]]:
    """Draw a method and what to send to it."""

    def of(path: str) -> st.SearchStrategy[tuple[str, bytes]]:
        descriptor = METHODS[path].input_type
        whole = messages(descriptor).map(lambda message: message.SerializeToString())
        data = st.one_of(whole, damaged(descriptor), st.binary(max_size=60))
        return st.tuples(st.just(path), data)

    return st.sampled_from(sorted(METHODS)).flatmap(of)


def check_status(path: str, error: Any) -> None:
    """A status of ours: a known reason, that reason's code, and nothing of the house in its words. gRPC's own
    services may also answer with a code of theirs."""
    trailers = dict(error.trailing_metadata() or ())
    if not path.startswith(_OURS) and "grpc-status-details-bin" not in trailers:
        assert error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (path, error)
        return
    assert "grpc-status-details-bin" in trailers, (error.code(), error.details())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    row = REASONS[Reason(info.reason)]
    assert row.code is error.code(), (info.reason, error.code())
    assert error.code() is not grpc.StatusCode.INTERNAL, error.details()
    assert status.message and "Traceback" not in status.message and ".py" not in status.message


@settings(
    max_examples=EXAMPLE_COUNT, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@example(("/icehouse.v1.InferenceService/Generate", b"\x1a\xff\xff\xff\xff\x0f"))
@example(("/icehouse.v1.InferenceService/Generate", b"\x0b" * 200))
@example(("/icehouse.v1.CacheService/Evict", b"\x28\x00"))
@example(("/icehouse.v1.InferenceService/Detokenize", b"\x12\x02\x80\x02"))
@given(calls())
def test_every_answer_is_a_status_of_ours(target: Target, call: tuple[str, bytes]) -> None:
    with broken_calls() as broken:
        error = target.call(*call)
    assert broken == []
    if error is not None:
        check_status(call[0], error)


def test_the_server_serves_after_all_of_it(target: Target) -> None:
    assert target.is_serving()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(IMAGE_METHODS), st.integers(0, 2**32))
def test_every_image_is_answered_with_a_status_of_ours(target: Target, path: str, seed: int) -> None:
    if target.served.router.require_model().images is None:
        pytest.skip("Pillow, of the extra `vision`, is not installed")
    rng = random.Random(seed)
    file = drawn_file(rng)
    sent = {"uri": drawn_uri(rng)} if rng.random() < 0.4 else {"data": file.data}
    image = prompt_pb2.ImagePart(media_type=file.media_type if rng.random() < 0.6 else "", **sent)
    part = prompt_pb2.ContentPart(image=image)
    prompt = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, parts=[part])])
    request: Any = GetMessageClass(METHODS[path].input_type)()
    request.prompt.chat.ParseFromString(prompt.SerializeToString())
    with broken_calls() as broken:
        error = target.call(path, request.SerializeToString())
    assert broken == []
    if error is not None:
        check_status(path, error)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_every_answer_is_a_status_of_ours_at_length(target: Target, call: tuple[str, bytes]) -> None:
    with broken_calls() as broken:
        error = target.call(*call)
    assert broken == []
    if error is not None:
        check_status(call[0], error)


@contextlib.contextmanager
def broken_calls() -> Iterator[list[str]]:
    """Collect what the house or gRPC logs as an exception that nobody foresaw."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info is not None or record.levelno >= logging.ERROR:
                found.append(record.getMessage())

    handler = Collector()
    loggers = [logging.getLogger(name) for name in ("icehouse_server", "icehouse", "grpc")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield found
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
