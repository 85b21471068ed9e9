"""Prompts off the event loop: checked and tokenized in turn, and what can never fit is not begun."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2, rerank_service_pb2, sampling_pb2
from icehouse_server.config import ServerConfig
from icehouse_server.domain.chat import (
    ChatMessage,
    Conversation,
    ImageSource,
    ImageTexts,
    PlacedImage,
    RenderedChat,
)
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.services.prompts import Chat, PromptReader, Text, UncheckedPrompt
from icehouse_server.rpc.services.rerank_service import form_of

from tests.fixtures.chat.families import THINKING, tokenizer_of
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, FakeTokenizer
from tests.unit.rpc.conftest import RunningServer, running

LONG = 300 << 10
"""A text that counts as long."""


class Workers:
    """Work that stays in its thread until a test lets it go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> Any:
        def run() -> str:
            self.begun.append(name)
            assert self.go.wait(BOUND_S)
            return name

        return run


@pytest.fixture
def workers() -> Any:
    made = Workers()
    yield made
    made.go.set()


async def begin(reader: PromptReader, work: Any, *, origin: str = "a", size_bytes: int = 0) -> Any:
    """Have work done for a caller; return when it has its turn or waits for it."""

    async def run() -> object:
        callers.origin.set(origin)
        return await reader.run(work, size_bytes=size_bytes)

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    return task


def prompt_reader(*, thread_count: int) -> PromptReader:
    return PromptReader(ServerConfig(tokenizer_thread_count=thread_count))


class HeldImages:
    """Images of one token each, read when a test lets them go."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    pixel_bytes = ()

    def open(self, sources: Any) -> Any:
        self._workers.work("images")()
        return self

    texts = ImageTexts("", (), ())

    def spans(self, token_ids: Any) -> tuple[()]:
        return ()


async def test_images_however_small_leave_a_thread_to_text(workers: Workers) -> None:
    reader = prompt_reader(thread_count=2)
    tokenizer: Any = FakeTokenizer()
    images: Any = HeldImages(workers)
    model = ServedModel(MODEL_INFO, tokenizer, images)
    picture = PlacedImage(0, ImageSource(b"x", "", "image"))
    shown = Chat(Conversation((ChatMessage("user", "?", images=(picture,)),)))
    sizes = (1, 17 << 10, 17 << 10)
    reading = [asyncio.ensure_future(reader.read(UncheckedPrompt(lambda: shown, n), model)) for n in sizes]
    text = await asyncio.wait_for(reader.read(UncheckedPrompt(lambda: Text("hi"), 2), model), BOUND_S)
    assert text.token_ids == tuple(b"hi")
    assert len(workers.begun) <= 1, "one thread, whatever the bytes of the messages"
    workers.go.set()
    assert {read.token_ids for read in await asyncio.gather(*reading)} == {tuple(b"user:?;")}
    reader.close()


def giant(*, has_last_role: bool = True) -> messages.GenerateRequest:
    """Return a conversation of many turns."""
    turns = [prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="a" * 20) for _ in range(4000)]
    last_role = prompt_pb2.ROLE_USER if has_last_role else prompt_pb2.ROLE_UNSPECIFIED
    turns.append(prompt_pb2.ChatMessage(role=last_role, content="a"))
    return messages.GenerateRequest(
        prompt={"chat": prompt_pb2.ChatPrompt(messages=turns)}, max_output_tokens=1
    )


async def test_a_long_conversation_is_not_checked_on_the_event_loop(
    served: RunningServer, workers: Workers
) -> None:
    reader = served.server._prompts
    held = [await begin(reader, workers.work(name)) for name in ("one", "two")]
    asking = asyncio.ensure_future(served.inference.Generate(giant(has_last_role=False), timeout=BOUND_S))
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    for _ in range(3):
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    # Its refusal comes from a thread, and those are both busy.
    assert not asking.done()
    workers.go.set()
    assert (await refused(asking)).field == "prompt.chat.messages[4000].role"
    assert await asyncio.gather(*held) == ["one", "two"]


async def test_long_work_leaves_a_thread_to_short_work(workers: Workers) -> None:
    reader = prompt_reader(thread_count=2)
    long = [await begin(reader, workers.work(f"long {i}"), origin=str(i), size_bytes=LONG) for i in range(3)]
    assert await reader.run(lambda: "short") == "short"
    assert workers.begun == ["long 0"]
    workers.go.set()
    await asyncio.gather(*long)
    reader.close()


async def test_work_whose_caller_left_keeps_its_turn_until_it_is_done(workers: Workers) -> None:
    reader = prompt_reader(thread_count=2)
    for _ in range(3):
        task = await begin(reader, workers.work("long"), size_bytes=LONG)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await reader.run(lambda: "short") == "short"
    assert workers.begun == ["long"]
    workers.go.set()
    reader.close()


async def test_one_callers_queue_is_not_everybodys(workers: Workers) -> None:
    reader = prompt_reader(thread_count=1)
    done: list[str] = []
    held = await begin(reader, workers.work("first"))
    mine = [await begin(reader, lambda i=i: done.append(f"mine {i}")) for i in range(3)]
    other = await begin(reader, lambda: done.append("other"), origin="b")
    workers.go.set()
    await asyncio.gather(held, other, *mine)
    assert done == ["mine 0", "other", "mine 1", "mine 2"]
    reader.close()


async def test_text_that_can_never_fit_is_not_tokenized(served: RunningServer) -> None:
    served.tokenizer.thread_names.clear()
    for asking in (
        served.inference.Generate(messages.GenerateRequest(prompt={"text": "a" * (1 << 20) + "b"})),
        served.inference.Tokenize(messages.TokenizeRequest(prompt={"text": "a" * (1 << 20) + "b"})),
    ):
        answer = await refused(asking)
        assert (answer.reason, answer.field) == ("PROMPT_TOO_LONG", "prompt.text")
        assert answer.info.metadata["limit_bytes"] == str(1 << 20)
    assert not served.tokenizer.thread_names


@pytest.mark.parametrize(
    ("turn", "field", "limit"),
    [
        ({"parts": [{"text": "a"}] * 257}, "parts", 256),
        ({"role": "ROLE_ASSISTANT", "tool_calls": [{"name": "f"}] * 257}, "tool_calls", 256),
        ({"role": "ROLE_ASSISTANT", "token_ids": [1] * 65}, "token_ids", 64),
    ],
)
async def test_what_one_turn_may_hold_is_counted(
    served: RunningServer, turn: dict[str, Any], field: str, limit: int
) -> None:
    message = prompt_pb2.ChatMessage(**{"role": "ROLE_USER", **turn})
    request = messages.GenerateRequest(prompt={"chat": prompt_pb2.ChatPrompt(messages=[message])})
    answer = await refused(served.inference.Generate(request))
    assert (answer.reason, answer.field) == ("CHAT_INVALID", f"prompt.chat.messages[0].{field}")
    assert answer.info.metadata["limit"] == str(limit)


async def test_turns_are_counted_before_they_are_looked_at(served: RunningServer) -> None:
    request = giant()
    request.prompt.chat.messages.extend([prompt_pb2.ChatMessage()] * 100)
    answer = await refused(served.inference.Generate(request))
    assert (answer.reason, answer.field) == ("CHAT_INVALID", "prompt.chat.messages")


async def test_a_rerank_form_that_multiplies_its_document_is_refused(served: RunningServer) -> None:
    answers = {"positive_answer": "y", "negative_answer": "n"}
    request = rerank_service_pb2.RerankRequest(
        query="q", documents=["d" * 100_000], text="{query}" + "{document}" * 1000, **answers
    )
    answer = await refused(served.reranking.Rerank(request))
    assert (answer.reason, answer.field) == ("PROMPT_TOO_LONG", "documents[0]")
    assert answer.info.metadata["length"] == str(1 + 100_000 * 1000)


async def test_a_rerank_form_is_no_longer_than_a_form(served: RunningServer) -> None:
    text = "{query}{document}" * 20_000
    request = rerank_service_pb2.RerankRequest(query="q", documents=["d"], text=text)
    answer = await refused(served.reranking.Rerank(request))
    assert (answer.reason, answer.field) == ("PARAMETER_OUT_OF_RANGE", "text")


@pytest.mark.parametrize("text", ["{query}{document}", "a {query} {document}{query} b {unknown}"])
def test_a_forms_length_is_known_before_it_is_filled(text: str) -> None:
    request = rerank_service_pb2.RerankRequest(query="what {document}?", text=text)
    form = form_of(request, MODEL_INFO)
    prompt = form.unchecked("this {query}")
    assert prompt.size_bytes == prompt.check().size_bytes  # type: ignore[union-attr]


SMALL = dataclasses.replace(MODEL_INFO, vocabulary_size=200)
"""A model whose table ends before its tokenizer's last tokens, as folders with tokens added later have it."""
THINKING_TOKENIZER = tokenizer_of(THINKING)
BEYOND = "\N{GRINNING FACE}"
"""Spelled by tokens from 128 to 240."""


async def test_text_that_spells_a_token_beyond_the_models_table_is_refused() -> None:
    turn = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content=BEYOND)
    prompts: list[tuple[str, dict[str, Any]]] = [
        ("text", {"text": BEYOND}),
        ("chat", {"chat": prompt_pb2.ChatPrompt(messages=[turn])}),
        ("infill", {"infill": prompt_pb2.InfillPrompt(prefix="a")}),
    ]
    async with running(info=SMALL) as served:
        for field, prompt in prompts:
            answer = await refused(served.inference.Generate(messages.GenerateRequest(prompt=prompt)))
            assert (answer.reason, answer.field) == ("TOKEN_OUT_OF_RANGE", f"prompt.{field}")
            assert answer.info.metadata["vocabulary_size"] == "200"
        wanted = messages.GenerateRequest(prompt={"text": "a" * 60}, max_output_tokens=1)
        assert (await served.inference.Generate(wanted)).text == " w0"


async def test_words_that_the_model_cannot_draw_need_no_ban() -> None:
    sampling = sampling_pb2.SamplingParams(bad_words=["a", BEYOND])
    async with running(info=SMALL) as served:
        await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, sampling=sampling))
        assert served.engine.submitted[0].sampling.banned == (tuple(b"a"), tuple(b" a"))


async def test_an_end_of_a_gap_that_the_model_cannot_draw_is_left_out() -> None:
    gap = prompt_pb2.InfillPrompt(prefix="a")
    async with running(info=dataclasses.replace(MODEL_INFO, vocabulary_size=259)) as served:
        served.tokenizer.gap_end_ids = (258, 259, 300)
        await served.inference.Generate(messages.GenerateRequest(prompt={"infill": gap}))
        assert served.engine.submitted[0].sampling.stop_token_ids == (258,)


async def test_reasoning_that_no_token_of_the_model_ends_cannot_be_bounded() -> None:
    turn = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="Hi")
    request = messages.GenerateRequest(
        prompt={"chat": prompt_pb2.ChatPrompt(messages=[turn])}, max_reasoning_tokens=1
    )
    async with running(info=SMALL) as served:
        served.tokenizer.reasoning = THINKING_TOKENIZER.reply_reasoning(
            Conversation((ChatMessage("user", "Hi"),)), RenderedChat(())
        )
        assert served.tokenizer.reasoning is not None
        assert min(served.tokenizer.reasoning.end_token_ids) >= SMALL.vocabulary_size
        answer = await refused(served.inference.Generate(request))
        assert (answer.reason, answer.field) == ("UNSUPPORTED", "max_reasoning_tokens")
