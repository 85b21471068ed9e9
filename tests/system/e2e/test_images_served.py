"""Pictures over the wire: bytes and data URIs, what they cost, what is refused, and where they come from."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from icehouse.v1 import cache_service_pb2, inference_service_pb2, model_service_pb2, prompt_pb2, usage_pb2
from icehouse_server.domain.model import EngineState
from icehouse_server.engine.runner.vision import mlx_vlm
from icehouse_server.errors import ModelError

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from PIL import Image

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.vision import TILE_TOKEN_COUNT, tiny_vision_dir
from tests.fixtures.rpc.details import refused
from tests.fixtures.web_host import answer, web_host
from tests.fixtures.whole_server import whole_server

OUTPUT_COUNT = 8
QUESTION = " what is it, and who had put it on the ground in that street?"


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image(data: bytes, **fields: Any) -> prompt_pb2.ContentPart:
    return prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(data=data, **fields))


def text(words: str) -> prompt_pb2.ContentPart:
    return prompt_pb2.ContentPart(text=words)


def chat(*parts: prompt_pb2.ContentPart, role: Any = prompt_pb2.ROLE_USER) -> prompt_pb2.ChatPrompt:
    return prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role=role, parts=parts)])


def request(prompt: prompt_pb2.ChatPrompt) -> inference_service_pb2.GenerateRequest:
    return inference_service_pb2.GenerateRequest(prompt={"chat": prompt}, max_output_tokens=OUTPUT_COUNT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_dir(tmp_path_factory.mktemp("models"))


def expected(folder: Path, data: bytes) -> tuple[list[int], int]:
    """Return the tokens that mlx-vlm generates by its own means, and how many the prompt has."""
    from mlx_vlm.generate import stream_generate
    from mlx_vlm.utils import load

    model, processor = load(str(folder))
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    pictures: list[Any] = [Image.open(io.BytesIO(data))]
    # The tiny tokenizer puts <bos> before what the template wrote; SmolVLM's own does not.
    processor.tokenizer.backend_tokenizer.post_processor = None
    told = list(
        stream_generate(model, processor, prompt, image=pictures, max_tokens=OUTPUT_COUNT, temperature=0.0)
    )
    return [int(each.token) for each in told][:OUTPUT_COUNT], told[-1].prompt_tokens


async def test_a_picture_is_answered_as_by_mlx_vlm_and_found_again(folder: Path, tmp_path: Path) -> None:
    tokens, prompt_count = expected(folder, png(1))
    uri = f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"
    by_uri = prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(uri=uri))
    async with whole_server(folder, tmp_path) as house:
        shown = await house.models.GetModel(model_service_pb2.GetModelRequest())
        cold = await house.inference.Generate(request(chat(image(png(1)), text(QUESTION))))
        warm = await house.inference.Generate(request(chat(by_uri, text(QUESTION))))
        other = await house.inference.Generate(request(chat(image(png(2)), text(QUESTION))))
        explained = await house.cache.Explain(
            cache_service_pb2.ExplainRequest(prompt={"chat": chat(image(png(1)), text(QUESTION))})
        )
    async with whole_server(folder, tmp_path) as house:
        ssd = await house.inference.Generate(
            request(chat(image(png(1), media_type="image/png"), text(QUESTION)))
        )
    assert shown.model.reads_images
    assert [list(each.token_ids) for each in (cold, warm, ssd)] == [tokens] * 3
    assert cold.usage.prompt_tokens == prompt_count
    # Four tiles and the whole; of what is written between them two tokens and more for each.
    assert 5 * TILE_TOKEN_COUNT < cold.usage.image_tokens < prompt_count - len(QUESTION) // 4
    assert (cold.usage.cached_tokens, warm.usage.ram_tokens) == (0, prompt_count - 1)
    assert ssd.usage.ssd_tokens == prompt_count - 1
    assert other.usage.cached_tokens < 16 and list(other.token_ids) != tokens
    assert explained.cache.cached_tokens == prompt_count - 1
    [span] = explained.images
    assert span.token_count == cold.usage.image_tokens and len(bytes.fromhex(span.digest)) == 32
    assert 0 < span.start_token < prompt_count - span.token_count


REFUSED = [
    (chat(image(png(1), detail=9)), "IMAGE_INVALID", "parts[0].image.detail"),
    (chat(image(png(1)[:99])), "IMAGE_INVALID", "prompt.chat.messages[0].parts[0].image"),
    (chat(text("x"), image(b"BM", media_type="image/bmp")), "IMAGE_INVALID", "parts[1].image"),
    (chat(image(b"")), "IMAGE_INVALID", "parts[0].image"),
    (chat(*[image(png(1))] * 3), "IMAGE_INVALID", "parts[2].image"),
    (chat(image(png(1)), text("<image>")), "CHAT_INVALID", "prompt.chat"),
    (chat(image(png(1)), role=prompt_pb2.ROLE_SYSTEM), "CHAT_INVALID", "parts[0].image"),
    (
        chat(prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(uri="https://example.org/a.png"))),
        "IMAGE_INVALID",
        "parts[0].image.uri",
    ),
]


async def test_a_picture_of_rows_is_counted_with_the_words_between_them(tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, "mistral3")
    tokens, prompt_count = expected(folder, png(1))
    async with whole_server(folder, tmp_path / "blocks") as house:
        cold = await house.inference.Generate(request(chat(image(png(1)), text(QUESTION))))
        warm = await house.inference.Generate(request(chat(image(png(1)), text(QUESTION))))
        told = await refused(house.inference.Generate(request(chat(image(png(1)), text("[IMG]")))))
    assert list(cold.token_ids) == list(warm.token_ids) == tokens
    # Four rows of five, and three breaks.
    assert (cold.usage.prompt_tokens, cold.usage.image_tokens) == (prompt_count, 4 * 5 + 3)
    assert (cold.usage.cached_tokens, warm.usage.ram_tokens) == (0, prompt_count - 1)
    assert (told.reason, told.field) == ("CHAT_INVALID", "prompt.chat")


async def test_an_image_is_itself_wherever_it_comes_from(folder: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "cat.png").write_bytes(png(1))
    (pictures / "list.txt").write_text("secret")

    def named(uri: str, **fields: Any) -> prompt_pb2.ChatPrompt:
        part = prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(uri=uri, **fields))
        return chat(part, text(QUESTION))

    async with web_host() as host:
        host.answers["/cat"] = answer(200, png(1))
        url = f"http://127.0.0.1:{host.port}/cat"
        allowed = {
            "server__image_folders": str(pictures),
            "server__image_hosts": f"127.0.0.1:{host.port}",
        }
        async with whole_server(folder, tmp_path / "blocks", **allowed) as house:
            cold = await house.inference.Generate(request(named(url)))
            count = cold.usage.prompt_tokens
            for prompt in (named(f"file://{pictures}/cat.png"), chat(image(png(1)), text(QUESTION))):
                warm = await house.inference.Generate(request(prompt))
                assert warm.usage.cached_tokens == count - 1 and warm.token_ids == cold.token_ids
            asked = inference_service_pb2.TokenizeRequest(prompt={"chat": named(url)})
            assert (await house.inference.Tokenize(asked)).token_count == count
            few = await house.inference.Generate(request(named(url, detail=prompt_pb2.IMAGE_DETAIL_LOW)))
            assert 0 < few.usage.image_tokens < cold.usage.image_tokens
            for uri in (
                f"file://{pictures}/list.txt",
                f"file://{pictures}/none",
                "file:///etc/passwd",
                f"{url}s",
            ):
                if uri == f"{url}s":
                    host.answers["/cats"] = answer(404, b"")
                told = await refused(house.inference.Generate(request(named(uri))))
                assert told.reason == "IMAGE_INVALID" and "secret" not in told.message
                assert told.field is not None and "parts[0].image" in told.field
            await host.stop()
            told = await refused(house.inference.Generate(request(named(url))))
            assert (told.code, told.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "IMAGE_UNREACHABLE")
    assert len(host.requests) == 4


async def test_what_is_refused_names_its_part(folder: Path, tmp_path: Path) -> None:
    async with whole_server(folder, tmp_path, server__max_images=2) as house:
        for prompt, reason, field in REFUSED:
            told = await refused(house.inference.Generate(request(prompt)))
            assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason), told
            assert told.field is not None and told.field.endswith(field), told
        answered = await house.inference.Generate(request(chat(text("it was a stone"))))
        assert len(answered.token_ids) == OUTPUT_COUNT and not answered.usage.image_tokens


async def test_a_picture_in_a_tools_result_is_seen(folder: Path, tmp_path: Path) -> None:
    """As an agent that uses a computer sends its screenshots."""
    asked = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content=QUESTION)
    result = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_TOOL, parts=[text("taken"), image(png(1))])
    told = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_TOOL, content="taken")
    by_user = prompt_pb2.ChatMessage(
        role=prompt_pb2.ROLE_USER, parts=[image(png(1), media_type="image/jpeg")]
    )
    async with whole_server(folder, tmp_path) as house:
        cold = await house.inference.Generate(request(prompt_pb2.ChatPrompt(messages=[asked, result])))
        same = request(prompt_pb2.ChatPrompt(messages=[asked, told, by_user]))
        warm = await house.inference.Generate(same)
    assert cold.usage.image_tokens and warm.token_ids == cold.token_ids
    assert warm.usage.cached_tokens == cold.usage.prompt_tokens - 1


async def test_a_stable_prompt_keeps_a_reply_about_pictures(folder: Path, tmp_path: Path) -> None:
    """The choice ends the reply; its tokens are not those of its text."""
    said = "the ground"

    def asked(*turns: prompt_pb2.ChatMessage) -> inference_service_pb2.GenerateRequest:
        chat = prompt_pb2.ChatPrompt(messages=turns, form=prompt_pb2.PROMPT_FORM_STABLE)
        asking = request(chat)
        asking.max_output_tokens = 64
        asking.response_format.choice.texts.append(said)
        return asking

    def shown(seed: int) -> prompt_pb2.ChatMessage:
        parts = [image(png(seed)), text(QUESTION)]
        return prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, parts=parts)

    answered = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_ASSISTANT, content=said)
    async with whole_server(folder, tmp_path) as house:
        first = await house.inference.Generate(asked(shown(1)))
        assert first.text == said
        second = await house.inference.Generate(asked(shown(1), answered, shown(2)))
        other = await house.inference.Generate(asked(shown(3), answered, shown(2)))
    known = first.usage.prompt_tokens + first.usage.output_tokens
    [change] = second.cache.prompt_changes
    assert (change.kind, change.count) == (usage_pb2.PROMPT_CHANGE_KIND_HISTORY_KEPT, known)
    assert second.usage.cached_tokens >= known - 1
    assert second.usage.image_tokens == 2 * first.usage.image_tokens
    assert not other.cache.prompt_changes


async def test_a_model_that_reads_text_says_so(tmp_path: Path) -> None:
    async with whole_server(tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks") as house:
        told = await refused(house.inference.Generate(request(chat(image(png(1)), text(QUESTION)))))
        assert told.reason == "IMAGES_UNSUPPORTED" and "reads only text" in told.message


async def test_text_that_mlx_lm_reads_is_served_without_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_vision_dir(tmp_path, "qwen2_5_vl")
    asked = request(chat(text("it was a stone")))
    async with whole_server(folder, tmp_path / "blocks") as house:
        whole = await house.inference.Generate(asked)
    monkeypatch.setattr(mlx_vlm, "is_installed", lambda: False)
    async with whole_server(folder, tmp_path / "blocks") as house:
        shown = await house.models.GetModel(model_service_pb2.GetModelRequest())
        read = await house.inference.Generate(asked)
        told = await refused(house.inference.Generate(request(chat(image(png(1)), text(QUESTION)))))
    assert not shown.model.reads_images
    assert told.reason == "IMAGES_UNSUPPORTED" and "pip install -e '.[vision]'" in told.message
    assert list(read.token_ids) == list(whole.token_ids)
    assert read.usage.cached_tokens == 0, "another reader's blocks are another model's"


async def test_without_the_extra_the_server_says_which_command_installs_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_vlm, "is_installed", lambda: False)
    with pytest.raises(ModelError, match=r"pip install -e '\.\[vision\]'"):
        async with whole_server(folder, tmp_path, until=EngineState.READY):
            pass
