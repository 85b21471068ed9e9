"""Memory of prepared images: bounded over all calls, and given back whichever way a call ends."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2
from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.chat import ImageSource, ImageTexts
from icehouse_server.domain.ids import ImageDigest
from icehouse_server.domain.request import ImageInput, ImageSpan
from icehouse_server.errors import Reason, Unavailable

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, counting, hanging, overloaded
from tests.unit.rpc.conftest import RunningServer, running

LIMIT_BYTES = 1 << 20
FITTING = 4
"""So many images of an eighth, and then the caller has half of all."""


class Images:
    """Images of one token, each an eighth of the memory."""

    def __init__(self) -> None:
        self.pixels_bytes = 0
        """What decoding one takes."""
        self.read_count = 0
        self.may_read = threading.Event()
        self.may_read.set()

    def open(self, sources: Sequence[ImageSource]) -> Images:
        self.count = len(sources)
        return self

    @property
    def pixel_bytes(self) -> Sequence[int]:
        return [self.pixels_bytes] * self.count

    def read_next(self) -> int:
        self.read_count += 1
        assert self.may_read.wait(30)
        return LIMIT_BYTES // 8

    @property
    def texts(self) -> ImageTexts:
        return ImageTexts("", ("",) * self.count, (ImageDigest(b""),) * self.count)

    def spans(self, token_ids: Sequence[int]) -> tuple[ImageSpan, ...]:
        pixels = HostTensor("pixels", "U8", (LIMIT_BYTES // 8,), memoryview(bytes(LIMIT_BYTES // 8)))
        image = ImageInput(ImageDigest(bytes(32)), (pixels,), feature_count=1)
        return tuple(ImageSpan(n, n + 1, image) for n in range(self.count))


@pytest.fixture
def images() -> Images:
    return Images()


@pytest.fixture
async def served(images: Images) -> AsyncIterator[RunningServer]:
    info = dataclasses.replace(MODEL_INFO, sees_images=True)
    settings = {"image_memory_bytes": LIMIT_BYTES, "tokenizer_thread_count": 3}
    async with running(info=info, images=images, **settings) as started:
        yield started


def request(image_count: int = 1, **fields: Any) -> messages.GenerateRequest:
    image = prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(data=b"png"))
    words = prompt_pb2.ContentPart(text="a stone")
    message = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, parts=[*[image] * image_count, words])
    return messages.GenerateRequest(prompt={"chat": prompt_pb2.ChatPrompt(messages=[message])}, **fields)


async def test_what_passes_the_limit_is_refused_and_text_is_not(served: RunningServer) -> None:
    served.engine.script = hanging
    streams = [served.inference.Stream(request()) for _ in range(FITTING)]
    for stream in streams:
        await stream.read()
    told = await refused(served.inference.Generate(request()))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL.value)
    assert "bytes of images" in told.message and str(LIMIT_BYTES) in told.message
    served.engine.script = counting
    assert (await served.inference.Generate(messages.GenerateRequest(prompt={"text": "a stone"}))).text
    streams[0].cancel()
    await served.cancelled()
    assert (await served.inference.Generate(request())).text, "its end made room"
    for stream in streams[1:]:
        stream.cancel()
        await served.cancelled()


async def test_every_end_of_a_call_gives_it_back(served: RunningServer) -> None:
    for _ in range(2):
        assert (await served.inference.Generate(request(FITTING))).text
        served.engine.refusal = overloaded()
        assert (await refused(served.inference.Generate(request(FITTING)))).reason == Reason.QUEUE_FULL.value
        served.engine.refusal = Unavailable(Reason.DRAINING, "it stops")
        assert (await refused(served.inference.Generate(request(FITTING)))).reason == Reason.DRAINING.value
        served.engine.refusal = None
        told = await refused(served.inference.Generate(request(FITTING, response_format={"regex": "wrong"})))
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_pixels_count_while_they_are_decoded_and_no_longer(
    served: RunningServer, images: Images, method: str
) -> None:
    def ask() -> Any:
        prompt = request().prompt
        kind = messages.GenerateRequest if method == "Generate" else messages.TokenizeRequest
        return getattr(served.inference, method)(kind(prompt=prompt), timeout=30)

    # As much as one caller may have: two are never decoded at once.
    images.pixels_bytes = LIMIT_BYTES // 2
    images.may_read.clear()
    first = asyncio.ensure_future(ask())
    while not images.read_count:
        await asyncio.sleep(0)
    told = await refused(ask())
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL.value)
    assert images.read_count == 1, "nothing of it was decoded"
    assert (await served.inference.Generate(messages.GenerateRequest(prompt={"text": "a stone"}))).text
    images.may_read.set()
    await first
    images.pixels_bytes = LIMIT_BYTES // 2 - LIMIT_BYTES // 8
    assert await ask()


async def test_prepared_images_of_a_caller_leave_less_for_its_pixels(
    served: RunningServer, images: Images
) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(request(2))
    await stream.read()
    images.pixels_bytes, read_count = LIMIT_BYTES // 2, images.read_count
    assert (await refused(served.inference.Generate(request()))).reason == Reason.QUEUE_FULL.value
    assert images.read_count == read_count
    stream.cancel()
    await served.cancelled()
    served.engine.script = counting
    assert (await served.inference.Generate(request())).text


async def test_what_is_prepared_counts_before_the_next_one_is_decoded(
    served: RunningServer, images: Images
) -> None:
    told = await refused(served.inference.Generate(request(FITTING + 4)))
    assert told.reason == Reason.QUEUE_FULL.value
    assert images.read_count == FITTING + 1, "the rest was not decoded"
    assert (await served.inference.Generate(request(FITTING))).text
