"""Images of a gateway's request: read off the event loop, and refused by name where they can be none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO
from tests.fixtures.rpc.worker import HAS_PROTOCOL, worker_parts

if not HAS_PROTOCOL:
    pytest.skip("smg-grpc-proto, of the extra `fleet`, is missing", allow_module_level=True)

import threading

from icehouse_server.config import ServerConfig
from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.ids import ImageDigest
from icehouse_server.domain.request import ImageInput, ImageSpan, SentImages
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.worker.gateway_request import sent_images_of, worker_request_of
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from tests.fixtures.sent_images import tensor_fields
from tests.unit.rpc.conftest import RunningServer, running

SEEING = dataclasses.replace(MODEL_INFO, sees_images=True)
PIXELS = np.arange(8, dtype=np.float32).reshape(2, 4)
GRID = np.array([[1, 2, 1]])
IDS = [1, 7, 7, 2, 7, 3]


def fields(**changes: Any) -> dict[str, Any]:
    """Return an image of two tokens and one of one token, or what `changes` of mm_inputs make of them."""
    inputs = {
        "pixel_values": tensor_fields(PIXELS),
        "model_specific_tensors": {"image_grid_thw": tensor_fields(GRID)},
        "mm_placeholders": [{"offset": 1, "length": 2}, {"offset": 4, "length": 1}],
        "im_token_id": 7,
        **changes,
    }
    return {"tokenized": {"input_ids": IDS}, "mm_inputs": inputs}


def read(**changes: Any) -> SentImages:
    request = messages.GenerateRequest(**fields(**changes))
    found = worker_request_of(request, info=SEEING, config=ServerConfig(max_images=3))
    assert found.read_images is not None and list(found.native.prompt.tokens.ids) == IDS
    return found.read_images()


def test_what_the_message_says_is_what_is_read() -> None:
    sent = read()
    assert [each.tensor.name for each in sent.tensors] == ["pixel_values", "image_grid_thw"]
    assert [each.field for each in sent.tensors] == [
        "mm_inputs.pixel_values",
        "mm_inputs.model_specific_tensors['image_grid_thw']",
    ]
    pixels, grid = (each.tensor for each in sent.tensors)
    assert (pixels.dtype, pixels.shape, bytes(pixels.data)) == ("F32", (2, 4), PIXELS.tobytes())
    assert (grid.dtype, grid.shape, bytes(grid.data)) == ("I64", (1, 3), GRID.tobytes())
    assert (sent.places, sent.places_field) == ((range(1, 3), range(4, 5)), "mm_inputs.mm_placeholders")
    assert (sent.token_id, sent.token_field) == (7, "mm_inputs.im_token_id")
    assert read(im_token_id=None).token_id is None


DECIDED = {"pixel_values", "model_specific_tensors", "im_token_id", "mm_placeholders"}
# An image is identified by its tensors, and the model knows their layout.
CLAIMS: dict[str, Any] = {
    "mm_hashes": ["an image that is another one"],
    "batched_keys": ["pixel_values"],
    "flat_keys": {"pixel_values": "image_grid_thw"},
    "keep_on_cpu_keys": ["image_grid_thw"],
}


def test_every_field_of_the_images_is_decided() -> None:
    known = DECIDED | {"modality", "encoder_input_key"} | set(CLAIMS)
    assert set(messages.MultimodalInputs.DESCRIPTOR.fields_by_name) == known
    tensor = messages.TensorData.DESCRIPTOR.fields_by_name
    assert set(tensor) == {"shape", "dtype", "inline", "shm", "remote"}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_gateway_claims_of_them_changes_nothing(name: str) -> None:
    assert read(**{name: CLAIMS[name]}) == read()
    assert read(modality=common.IMAGE, encoder_input_key="pixel_values") == read()


def pixels(**changes: Any) -> dict[str, Any]:
    told = {**tensor_fields(PIXELS), **changes}
    return {"pixel_values": {name: value for name, value in told.items() if value is not None}}


def places(*told: tuple[int, int]) -> dict[str, Any]:
    return {"mm_placeholders": [{"offset": offset, "length": length} for offset, length in told]}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a video": ({"modality": common.VIDEO}, ".modality", "only images are supported"),
    "no known modality": ({"modality": 77}, ".modality", "is 77"),
    "another key": ({"encoder_input_key": "patches"}, ".encoder_input_key", "is 'patches'"),
    "no pixels": ({"pixel_values": None}, ".pixel_values", "no KV is taken from other workers"),
    "no places": (places(), ".mm_placeholders", "has 0 images; it must have 1 to 3"),
    "many places": (places(*[(1, 1)] * 4), ".mm_placeholders", "has 4 images; it must have 1 to 3"),
    "many tensors": (
        {"model_specific_tensors": {f"t{n}": tensor_fields(GRID) for n in range(9)}},
        ".model_specific_tensors",
        "has 9 tensors; the limit is 8",
    ),
    "two pixels": (
        {"model_specific_tensors": {"pixel_values": tensor_fields(PIXELS)}},
        ".model_specific_tensors['pixel_values']",
        "is set beside",
    ),
    "a shared memory": (
        pixels(inline=None, shm={"name": "/dev/shm/x", "nbytes": 32}),
        ".pixel_values",
        "is not in the message",
    ),
    "another machine": (pixels(inline=None, remote={"transport": "nixl"}), ".pixel_values", "is not in the"),
    "an unknown type": (pixels(dtype="float64"), ".pixel_values", "has the type 'float64'; supported are"),
    "no type": (pixels(dtype=""), ".pixel_values", "has the type ''"),
    "no shape": (pixels(shape=[]), ".pixel_values", "has 0 dimensions; it must have 1 to 8"),
    "many dimensions": (pixels(shape=[1] * 9), ".pixel_values", "has 9 dimensions"),
    "fewer bytes": (
        pixels(inline=b"\0" * 31),
        ".pixel_values",
        "has 31 bytes; the shape [2, 4] of",
    ),
    "more bytes": (pixels(inline=b"\0" * 33), ".pixel_values", "has 33 bytes"),
    "no bytes": (pixels(inline=None), ".pixel_values", "has 0 bytes"),
    "a shape of all there is": (pixels(shape=[2**32 - 1] * 8), ".pixel_values", "has 32 bytes; the shape"),
    "a map of nothing": (
        {"model_specific_tensors": {"image_grid_thw": {}}},
        ".model_specific_tensors['image_grid_thw']",
        "has the type ''",
    ),
    "a long name": (
        {"model_specific_tensors": {"x" * 5000: {}}},
        f".model_specific_tensors['{'x' * 78}…]",
        "has the type ''",
    ),
    "a place of nothing": (places((1, 0)), ".mm_placeholders[0]", "the length 0"),
    "beyond the prompt": (places((1, 2), (4, 3)), ".mm_placeholders[1]", "in the prompt's 6 tokens"),
    "far beyond": (places((2**32 - 1, 2**32 - 1)), ".mm_placeholders[0]", "the offset 4294967295"),
    "two in one place": (places((1, 3), (3, 2)), ".mm_placeholders[1]", "begin at 4 or later"),
    "in another order": (places((4, 1), (1, 2)), ".mm_placeholders[1]", "begin at 5 or later"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_an_image_is_refused_by_its_name(case: str) -> None:
    changes, field, words = REFUSED[case]
    with pytest.raises(InvalidRequest) as caught:
        read(**changes)
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, f"mm_inputs{field}")
    assert caught.value.message.startswith(f"mm_inputs{field} ") and words in caught.value.message


def test_a_model_that_reads_text_and_a_prompt_of_text_are_refused() -> None:
    request = messages.GenerateRequest(**fields())
    with pytest.raises(InvalidRequest, match=r"mm_inputs has images; .*'tiny' .* reads only text") as caught:
        worker_request_of(request, info=MODEL_INFO, config=ServerConfig())
    assert caught.value.reason is Reason.IMAGES_UNSUPPORTED
    request.text = "a prompt"
    with pytest.raises(InvalidRequest, match="mm_inputs is set without `tokenized`"):
        worker_request_of(request, info=SEEING, config=ServerConfig())


def test_nothing_of_the_tensors_is_read_before_they_are_asked_for() -> None:
    request = messages.GenerateRequest(**fields(**pixels(inline=b"\0")))
    found = worker_request_of(request, info=SEEING, config=ServerConfig())
    assert found.read_images is not None
    with pytest.raises(InvalidRequest, match="has 1 bytes"):
        sent_images_of(request)


class Images:
    """Takes what it is given, and notes in which thread."""

    def __init__(self) -> None:
        self.thread_names: set[str] = set()

    def open(self, sources: Sequence[Any]) -> Any:
        raise AssertionError("nobody sends files")

    def place(self, token_ids: Sequence[int], sent: SentImages) -> tuple[ImageSpan, ...]:
        self.thread_names.add(threading.current_thread().name)
        if token_ids[0] != 1:
            raise InvalidRequest(Reason.IMAGE_INVALID, "mm_inputs is no image", field="mm_inputs")
        tensors = tuple(HostTensor(t.tensor.name, "U8", (1,), memoryview(b"a")) for t in sent.tensors)
        image = ImageInput(ImageDigest(bytes(32)), tensors, feature_count=1)
        return tuple(ImageSpan(place.start, place.stop, image) for place in sent.places)


async def served_answer(served: RunningServer, **changes: Any) -> Any:
    request = messages.GenerateRequest(**{**fields(), **changes})
    return [response async for response in served.worker.Generate(request)]


async def test_images_reach_the_engine_by_way_of_a_thread() -> None:
    images = Images()
    async with running(info=SEEING, images=images, worker=worker_parts()) as served:
        assert (await served.worker.GetModelInfo(messages.GetModelInfoRequest())).supports_vision
        limits = (await served.worker.GetServerInfo(messages.GetServerInfoRequest())).mm_item_limits
        await served_answer(served)
        await served_answer(served, tokenized={"input_ids": [*IDS, *[1] * 20]})
        with_extra = messages.GenerateRequest(**fields(), extra_mm_inputs=[{}])
        extra = await refused(served.worker.Generate(with_extra).read())
    assert limits == "image=16"
    first, second = served.engine.submitted[:2]
    assert [(span.start_token_index, span.end_token_index) for span in first.images] == [(1, 3), (4, 5)]
    assert first.prompt_token_ids == tuple(IDS) and len(second.prompt_token_ids) == 26
    assert all(name.startswith("tokenizer") for name in images.thread_names)
    assert (extra.reason, extra.field) == ("UNSUPPORTED", "extra_mm_inputs")


async def test_a_refusal_of_the_model_s_own_is_told() -> None:
    async with running(info=SEEING, images=Images(), worker=worker_parts()) as served:
        request = messages.GenerateRequest(**{**fields(), "tokenized": {"input_ids": [9, *IDS[1:]]}})
        told = await refused(served.worker.Generate(request).read())
    assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID")
    assert (told.field, told.message) == ("mm_inputs", "mm_inputs is no image")
    assert not served.engine.submitted


async def test_a_model_that_reads_text_alone_has_no_vision() -> None:
    async with running(worker=worker_parts()) as served:
        assert not (await served.worker.GetModelInfo(messages.GetModelInfoRequest())).supports_vision
        assert not (await served.worker.GetServerInfo(messages.GetServerInfoRequest())).mm_item_limits
