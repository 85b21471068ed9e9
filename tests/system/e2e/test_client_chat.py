"""The Python client holds a conversation with tools, as its README says."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from icehouse_client import AsyncClient, Client, FinishReason, IcehouseClientError, Message, Tool, tool_result

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models.chat_templates import REMEMBERING, TOOL_CALL
from tests.fixtures.terminal import invoke
from tests.fixtures.whole_server import whole_server

WEATHER = Tool(
    "get_weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}}
)
ASKED = Message("user", "Is it raining in Oslo?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain_model_dir(tmp_path_factory.mktemp("model"), REMEMBERING, TOOL_CALL, first="Ċ")


async def test_a_call_is_answered_and_the_conversation_goes_on(folder: Path, tmp_path: Path) -> None:
    async with whole_server(folder, tmp_path, cache__block_token_count=16) as served:

        def talk() -> None:
            with Client(served.served.rpc.address) as client:
                reply = client.chat([ASKED], tools=[WEATHER], request_id="r")
                (call,) = reply.tool_calls
                assert (call.name, call.arguments) == ("get_weather", {"city": "Oslo"})
                assert (reply.text, reply.reasoning) == ("Wait. ", "rain?")
                assert reply.finish_reason is FinishReason.TOOL_CALLS and not reply.malformed_tool_calls
                with client.stream([ASKED], tools=[WEATHER], request_id="r") as stream:
                    assert list(stream) == ["Wait. "]
                assert stream.reply.tool_calls == reply.tool_calls
                assert stream.reply.message() == reply.message()
                messages = [ASKED, reply.message(), tool_result(call, "dry")]
                following = client.chat(messages, tools=[WEATHER], tool_choice="none")
                assert following.text.startswith("Wait. <tool_call>") and not following.tool_calls
                assert following.usage.cached_tokens >= reply.usage.prompt_tokens - 1
                assert len(client.tokenize(messages[:1], tools=[WEATHER])) == reply.usage.prompt_tokens

        await asyncio.to_thread(talk)


async def test_options_of_a_chat_arrive(folder: Path, tmp_path: Path) -> None:
    async with whole_server(folder, tmp_path) as served, AsyncClient(served.served.rpc.address) as client:
        named = await client.chat([ASKED], tools=[WEATHER], tool_choice=WEATHER, max_output_tokens=1)
        plain = await client.chat([ASKED], tools=[WEATHER], max_output_tokens=1)
        assert named.usage.prompt_tokens > plain.usage.prompt_tokens
        going_on = await client.chat(
            [ASKED, Message("assistant", "Well")], continue_final_message=True, max_output_tokens=1
        )
        assert going_on.usage.prompt_tokens > 0
        with pytest.raises(IcehouseClientError, match="tools") as caught:
            await client.chat([ASKED], template_arguments={"tools": []})
        assert (caught.value.reason, caught.value.field) == ("CHAT_INVALID", "prompt.chat.template_arguments")
        with pytest.raises(IcehouseClientError) as caught:
            await client.chat([ASKED], tools=[WEATHER], tool_choice=Tool("other"))
        assert caught.value.reason == "TOOL_CHOICE_INVALID"


async def test_each_turn_of_a_chat_at_the_terminal_starts_from_the_cache(
    folder: Path, tmp_path: Path
) -> None:
    async with whole_server(folder, tmp_path, cache__block_token_count=16) as served:
        address = served.served.rpc.address
        turns = "Is it raining in Oslo?\nAnd in Bergen, where it always does?\nSo?\n"
        file = str(tmp_path / "talk.json")
        result = await invoke("chat", "--json", "--save", file, "--address", address, input=turns)
        explained = await invoke("explain", "Is it raining in Oslo?", "--chat", "--address", address)
        whole = await invoke("explain", "--messages", file, "--json", "--address", address)
    assert result.exit_code == 0, result.output
    usages = [json.loads(line)["usage"] for line in result.stdout.splitlines()]
    assert len(usages) == 3 and usages[0]["cached_tokens"] == 0
    for earlier, later in itertools.pairwise(usages):
        known = earlier["prompt_tokens"] + earlier["output_tokens"]
        assert later["cached_tokens"] >= known - 2 * 16, "all but the block that was not full"
    assert "from RAM" in explained.stdout and "first token in about" in explained.stdout
    last, report = usages[-1], json.loads(whole.stdout)
    assert report["prompt_tokens"] > last["prompt_tokens"] + last["output_tokens"] - 2
    assert report["cache"]["cached_tokens"] >= last["prompt_tokens"] + last["output_tokens"] - 2 * 16
