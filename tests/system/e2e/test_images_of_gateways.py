"""Pictures that a gateway has prepared: tokens, blocks and answers are those of the same one in a chat."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from icehouse.v1 import cache_service_pb2, inference_service_pb2, prompt_pb2

from tests.fixtures.rpc.worker import HAS_PROTOCOL

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
if not HAS_PROTOCOL:
    pytest.skip("smg-grpc-proto, of the extra `fleet`, is missing", allow_module_level=True)

from icehouse_server.vision.processor import open_processor
from PIL import Image
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from tests.fixtures.models.vision import FAMILIES, tiny_vision_dir
from tests.fixtures.models.vocabulary import VOCABULARY_SIZE
from tests.fixtures.rpc.details import refused
from tests.fixtures.sent_images import arrays_of, worker_inputs
from tests.fixtures.whole_server import WholeServer, whole_server

OUTPUT_COUNT = 8
QUESTION = " what is it, and who had put it on the ground in that street?"


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def chat(*pictures: bytes) -> prompt_pb2.ChatPrompt:
    parts = [prompt_pb2.ContentPart(text="It stood there: ")]
    parts += [prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(data=each)) for each in pictures]
    parts.append(prompt_pb2.ContentPart(text=QUESTION))
    return prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, parts=parts)])


@dataclasses.dataclass(frozen=True)
class Gateway:
    """Makes of pictures what a gateway would that has our own processor."""

    folder: Path
    house: WholeServer

    async def request(self, *pictures: bytes) -> messages.GenerateRequest:
        """Return the chat of these pictures as tokens and tensors."""
        prompt = chat(*pictures)
        told = await self.house.inference.Tokenize(
            inference_service_pb2.TokenizeRequest(prompt={"chat": prompt})
        )
        known = await self.house.cache.Explain(cache_service_pb2.ExplainRequest(prompt={"chat": prompt}))
        places = [range(span.start_token, span.start_token + span.token_count) for span in known.images]
        kind = FAMILIES[self.folder.name].config()["model_type"]
        processor = open_processor(self.folder, kind)
        opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
        arrays = arrays_of([processor.prepare(each).image for each in opened])
        return messages.GenerateRequest(
            tokenized={"input_ids": [token.id for token in told.tokens]},
            sampling_params={"temperature": 0.0, "max_tokens": OUTPUT_COUNT, "ignore_eos": True},
            mm_inputs=worker_inputs(arrays, places, token_id=VOCABULARY_SIZE),
        )

    async def ask(self, request: messages.GenerateRequest) -> Any:
        """Return what the worker answers at once."""
        [answer] = [each.complete async for each in self.house.worker.Generate(request)]
        return answer

    async def chat(self, *pictures: bytes) -> Any:
        """Return the answer of icehouse.v1."""
        request = inference_service_pb2.GenerateRequest(
            prompt={"chat": chat(*pictures)}, max_output_tokens=OUTPUT_COUNT
        )
        request.sampling.ignore_end_tokens = True
        return await self.house.inference.Generate(request)


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "smolvlm", "lfm2_vl", "mistral3"])
async def test_a_picture_is_the_same_by_either_way_and_another_one_is_not(kind: str, tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, kind)
    settings = {"fleet__worker_enabled": True, "cache__block_token_count": 16}
    async with whole_server(folder, tmp_path / "blocks", **settings) as house:
        gateway = Gateway(folder, house)
        one, other = await gateway.request(png(1), png(2)), await gateway.request(png(3), png(2))
        cold = await gateway.chat(png(1), png(2))
        warm = await gateway.ask(one)
        strange = await gateway.ask(other)
        again = await gateway.chat(png(3), png(2))
    count, start = len(one.tokenized.input_ids), one.mm_inputs.mm_placeholders[0].offset
    assert list(one.tokenized.input_ids) == list(other.tokenized.input_ids), "only the pictures differ"
    assert (warm.prompt_tokens, warm.cached_tokens) == (count, count - 1)
    assert list(warm.output_ids) == list(cold.token_ids)
    assert strange.cached_tokens <= start, "nothing behind a picture is another one's"
    assert again.usage.cached_tokens == count - 1, "what came by a gateway is found by a chat"
    assert list(strange.output_ids) == list(again.token_ids)
    async with whole_server(folder, tmp_path / "blocks", **settings) as house:
        gateway = Gateway(folder, house)
        ssd = await gateway.ask(other)
    assert (ssd.cached_tokens, list(ssd.output_ids)) == (count - 1, list(strange.output_ids))


async def test_what_is_refused_costs_nothing_and_names_its_field(tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, "qwen2_5_vl")
    async with whole_server(folder, tmp_path / "blocks", fleet__worker_enabled=True) as house:
        gateway = Gateway(folder, house)
        good = await gateway.request(png(1))
        pixels = np.frombuffer(good.mm_inputs.pixel_values.inline, np.float32).copy()
        pixels[7] = np.nan
        for field, change in {
            "mm_inputs.pixel_values": {"pixel_values": {"inline": pixels.tobytes()}},
            "mm_inputs.im_token_id": {"im_token_id": 1},
            "mm_inputs.mm_placeholders": {"mm_placeholders": [{"offset": 1, "length": 1}]},
            "mm_inputs.model_specific_tensors['x']": {
                "model_specific_tensors": {"x": {"shape": [1], "dtype": "uint8", "inline": b"a"}}
            },
        }.items():
            bad = messages.GenerateRequest()
            bad.CopyFrom(good)
            bad.mm_inputs.MergeFrom(messages.MultimodalInputs(**change))
            told = await refused(house.worker.Generate(bad).read())
            assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID")
            assert told.field is not None and told.field.startswith(field), told
        assert len((await gateway.ask(good)).output_ids) == OUTPUT_COUNT
