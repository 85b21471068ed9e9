"""Reasoning is counted and ends where a request says, through the whole house, beside others and parked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import speculation_pb2, usage_pb2
from icehouse_server.domain.chat import Conversation, RenderedChat
from icehouse_server.domain.events import Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.structured_output.reasoning_budget import FormScope, ReasoningBudget

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.chat.families import THINKING, tokenizer_of, turns
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.chat_templates import ALTERNATING, write_family
from tests.fixtures.whole_server import whole_server
from tests.system.cache import server as cache_server
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt
from tests.system.load.test_parking import PressedRunner

THOUGHTS = ("wonder ", "doubt ", "weigh ", "see ")
SCRIPT = ("<think>", *THOUGHTS, "</think>", "Dry.", "<eos>")
FULL = ("".join(THOUGHTS), "Dry.", 4)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain_model_dir(tmp_path_factory.mktemp("thinking"), THINKING, SCRIPT, first="Ċ")


def asked(**fields: Any) -> messages.GenerateRequest:
    chat = {"messages": [{"role": "ROLE_USER", "content": "Is it raining in Oslo?"}]}
    prompt = {"chat": fields.pop("chat", chat)}
    return ParseDict({"prompt": prompt, "max_output_tokens": 24, **fields}, messages.GenerateRequest())


def told(answer: Any) -> tuple[str, str, int]:
    return answer.reasoning, answer.text, answer.usage.reasoning_tokens


async def test_a_budget_closes_reasoning_and_usage_counts_it(thinking: Path, tmp_path: Path) -> None:
    async with whole_server(thinking, tmp_path, cache__block_token_count=16) as served:
        generate = served.inference.Generate
        whole = await generate(asked())
        assert told(whole) == FULL
        assert whole.usage.output_tokens == len(SCRIPT)
        for limit in (0, 1, 3, 4, 9):
            answer = await generate(asked(max_reasoning_tokens=limit))
            thought = THOUGHTS[:limit]
            assert told(answer) == ("".join(thought), "Dry.", len(thought)), limit
            assert answer.usage.output_tokens == len(thought) + 4
            assert answer.finish_reason == usage_pb2.FINISH_REASON_STOP_TOKEN
        events = [event async for event in served.inference.Stream(asked(max_reasoning_tokens=3))]
        assert "".join(event.delta.reasoning for event in events) == "".join(THOUGHTS[:3])
        assert events[-1].finished.usage.reasoning_tokens == 3
        plain = await generate(messages.GenerateRequest(prompt={"text": "<think>"}, max_output_tokens=4))
        assert (plain.usage.reasoning_tokens, plain.reasoning) == (0, ""), "of text nothing is told apart"
        cut = await generate(asked(max_output_tokens=3))
        assert told(cut) == ("".join(THOUGHTS[:2]), "", 2)
        plainly = await generate(asked(max_reasoning_tokens=1, speculation={"prompt_lookup": {}}))
        assert told(plainly) == ("wonder ", "Dry.", 1)
        assert plainly.usage.speculation_limit == speculation_pb2.SPECULATION_LIMIT_SAMPLING


async def test_beside_other_requests_and_in_several_outputs_each_keeps_its_own(
    thinking: Path, tmp_path: Path
) -> None:
    sampling = {"temperature": 0.01, "seed": 3}
    requests = [
        asked(),
        *(asked(max_reasoning_tokens=limit) for limit in range(4)),
        asked(max_reasoning_tokens=2, sampling=sampling, completions=3),
        messages.GenerateRequest(prompt={"text": "Once upon a time"}, max_output_tokens=24),
    ]
    async with whole_server(thinking, tmp_path, cache__block_token_count=16) as served:
        alone = [await served.inference.Generate(request) for request in requests]
        together = await asyncio.gather(*(served.inference.Generate(request) for request in requests))
    for one, other in zip(alone, together, strict=True):
        assert (list(one.token_ids), told(one)) == (list(other.token_ids), told(other))
    assert [told(answer)[2] for answer in together[:5]] == [4, 0, 1, 2, 3]
    assert [told(completion) for completion in together[5].completions] == [("wonder doubt ", "Dry.", 2)] * 3


async def test_a_response_format_begins_behind_the_reasoning(thinking: Path, tmp_path: Path) -> None:
    form = {"choice": {"texts": ["yes", "no"]}}
    opened = {
        "messages": [
            {"role": "ROLE_USER", "content": "Is it raining?"},
            {"role": "ROLE_ASSISTANT", "reasoning": "wonder "},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    async with whole_server(thinking, tmp_path) as served:
        generate = served.inference.Generate
        answer = await generate(asked(response_format=form, max_reasoning_tokens=2))
        assert told(answer)[1] in ("yes", "no") and told(answer)[::2] == ("wonder doubt ", 2)
        assert answer.finish_reason == usage_pb2.FINISH_REASON_STOP_TOKEN
        bare = await generate(asked(response_format=form))
        assert bare.text in ("yes", "no") and not bare.reasoning, "without a budget the form is the output's"
        closed = await generate(asked(response_format=form, max_reasoning_tokens=0))
        assert closed.text == bare.text and not closed.reasoning
        for fields, count in (({}, 3), ({"max_reasoning_tokens": 2}, 2)):
            went_on = await generate(asked(chat=opened, response_format=form, **fields))
            assert told(went_on)[1] in ("yes", "no") and told(went_on)[2] == count, "the prompt opens it"


async def test_a_model_that_marks_no_reasoning_has_no_budget(tmp_path: Path) -> None:
    folder = chain_model_dir(tmp_path / "model", ALTERNATING, ("Dry.", "<eos>"), first="[/INST]")
    async with whole_server(folder, tmp_path / "blocks") as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.inference.Generate(asked(max_reasoning_tokens=1))
        answer = await served.inference.Generate(asked())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_reasoning_tokens" in str(caught.value.details())
    assert told(answer) == ("", "Dry.", 0)


LIMIT = 20


def budgeted(name: str, *, salt: int, sampling: SamplingParams) -> GenerationRequest:
    """Return a request of a prompt that ends within reasoning, which random weights would never close."""
    tokenizer = tokenizer_of(THINKING)
    tokens = tuple(prompt(2 * BLOCK + 9, salt=salt))
    asked_by = Conversation(turns(("user", "Hi")))
    reasoning = tokenizer.reply_reasoning(asked_by, RenderedChat((), is_reasoning=True))
    assert reasoning is not None
    return GenerationRequest(
        request_id=RequestId(name),
        prompt_token_ids=tokens,
        max_output_tokens=40,
        sampling=sampling,
        stop=(),
        arrival_time=0.0,
        shows_markers=True,
        reasoning=reasoning,
        grammar=ReasoningBudget(
            reasoning=reasoning,
            token_limit=LIMIT,
            form=None,
            scope=FormScope.WHOLE,
            decode=tokenizer.decode_with_markers,
            prompt_token_ids=tokens,
            end_token_ids=tokenizer.eos_token_ids,
            vocabulary_size=tokenizer.vocabulary_size,
        ),
    )


@pytest.mark.parametrize("is_pipelined", [True, False], ids=["pipelined", "not pipelined"])
def test_a_parked_output_goes_on_with_what_is_left_of_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pipelined: bool
) -> None:
    size = tokenizer_of(THINKING).vocabulary_size
    folder = write_family(tiny_model_dir(tmp_path, "llama", vocab_size=size), THINKING)
    requests = [
        budgeted("greedy", salt=1, sampling=SamplingParams(ignores_end_tokens=True)),
        budgeted(
            "sampled", salt=2, sampling=SamplingParams(temperature=0.9, seed=7, ignores_end_tokens=True)
        ),
    ]

    def outputs(served: CacheServer) -> dict[str, tuple[list[int], int]]:
        found = {}
        for request in requests:
            served.engine.submit(request)
        for request in requests:
            name = str(request.request_id)
            end = served.recorder.wait_for_end(name)
            assert isinstance(end, Finished)
            found[name] = (served.recorder.tokens_of(name), end.usage.reasoning_token_count)
        return found

    with CacheServer(folder, None, is_pipelined=is_pipelined) as served:
        undisturbed = outputs(served)
    monkeypatch.setattr(cache_server, "ModelRunner", PressedRunner)
    with CacheServer(folder, None, is_pipelined=is_pipelined, budget=MemoryBudget(1 << 30)) as served:
        parked = outputs(served)
        assert served.stats()[0].parked_total >= 1
    assert parked == undisturbed
    (end_marker,) = tokenizer_of(THINKING).spell("</think>")
    for token_ids, reasoning_token_count in parked.values():
        assert token_ids.index(end_marker) == LIMIT == reasoning_token_count
