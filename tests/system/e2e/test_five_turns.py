"""A conversation of five turns goes on from the blocks of the turns before it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.chat_templates import REMEMBERING, THINKING, Family, write_family
from tests.fixtures.whole_server import WholeServer, whole_server

TURN_COUNT = 5
EMPTY_THOUGHT_TOKENS = 6
"""Two markers and four line ends."""
THOUGHTFUL = ("<think>", "\nI wonder.", "\n</think>", "\n\nWell, ", "e")


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What one turn cost and what it could have reused."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


async def talk(served: WholeServer, *, with_tokens: bool, template_arguments: dict[str, Any]) -> list[Turn]:
    """Hold a conversation as a client does: each answer becomes a message of the next request."""
    chat = prompt_pb2.ChatPrompt()
    chat.template_arguments.update(template_arguments)
    turns = []
    for index in range(TURN_COUNT):
        chat.messages.add(
            role=prompt_pb2.ROLE_USER, content=f"Tell me more, please, this is question {index}."
        )
        answer = await served.inference.Generate(
            messages.GenerateRequest(prompt={"chat": chat}, max_output_tokens=40)
        )
        tokens = answer.token_ids if with_tokens else ()
        chat.messages.add(
            role=prompt_pb2.ROLE_ASSISTANT,
            content=answer.text,
            reasoning=answer.reasoning,
            token_ids=tokens,
        )
        usage = answer.usage
        turns.append(Turn(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens))
    return turns


def lost(turns: list[Turn]) -> list[int]:
    """Return for each turn but the first how many tokens of the one before, prompt and output, ran again."""
    return [
        before.prompt_tokens + before.output_tokens - turn.cached_tokens
        for before, turn in itertools.pairwise(turns)
    ]


@pytest.fixture(scope="module")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: it draws tokens that the tokenizer would hardly ever choose, and never a marker."""
    return write_family(tiny_model_dir(tmp_path_factory.mktemp("babbling"), "llama"), REMEMBERING)


@pytest.mark.parametrize("ssd", [False, True], ids=["ram", "restarted"])
async def test_history_that_is_not_rewritten_is_never_computed_again(
    babbling: Path, tmp_path: Path, ssd: bool
) -> None:
    settings = {"cache__block_token_count": 16, "cache__restore_or_recompute": False}
    async with whole_server(babbling, tmp_path, **settings) as served:
        turns = await talk(served, with_tokens=True, template_arguments={})
    # The last token of an output was drawn and never fed, so its KV does not exist.
    assert all(count <= 1 for count in lost(turns)), turns
    if ssd:
        async with whole_server(babbling, tmp_path, **settings) as served:
            again = await talk(served, with_tokens=True, template_arguments={})
        assert [turn.output_tokens for turn in again] == [turn.output_tokens for turn in turns]
        assert again[0].cached_tokens == again[0].prompt_tokens - 1


async def test_without_the_drawn_tokens_reuse_ends_where_the_words_are_cut_otherwise(
    babbling: Path, tmp_path: Path
) -> None:
    async with whole_server(babbling, tmp_path, cache__block_token_count=16) as served:
        turns = await talk(served, with_tokens=False, template_arguments={})
    assert max(lost(turns)) > 1, "the model drew what the tokenizer chooses; this tests nothing"
    # What was asked, all of it, is known still.
    assert all(after.cached_tokens >= before.prompt_tokens - 1 for before, after in itertools.pairwise(turns))


@pytest.mark.parametrize("enable_thinking", [True, False])
async def test_history_that_loses_its_thoughts_is_reused_up_to_them(
    tmp_path: Path, enable_thinking: bool
) -> None:
    """The template drops the thoughts of the past, and where thinking is off it opens none."""
    family: Family = THINKING
    folder = chain_model_dir(tmp_path / "model", family, THOUGHTFUL, first="Ċ")
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=16) as served:
        turns = await talk(served, with_tokens=True, template_arguments={"enable_thinking": enable_thinking})
    # The header of a silent turn ends with an empty thought, which the past does not keep either.
    header = 0 if enable_thinking else EMPTY_THOUGHT_TOKENS
    for before, after in itertools.pairwise(turns):
        assert after.cached_tokens >= before.prompt_tokens - 1 - header, turns
        assert after.cached_tokens < before.prompt_tokens + before.output_tokens - 1, "thoughts are gone"
