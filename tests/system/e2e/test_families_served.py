"""Families beyond Hermes's, served whole: their thoughts and calls on the wire, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import model_service_pb2 as model_messages
from icehouse.v1 import usage_pb2

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.chat.family_templates import template_of
from tests.fixtures.models.chat_templates import THINKING, Family
from tests.fixtures.whole_server import whole_server
from tests.system.e2e.test_chat_served import TOOLS, asked, heard, summed, whole

HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
TOKENS = (*((marker, True) for marker in HARMONY_MARKERS), ("assistant", False))
GPT_OSS = Family(template_of("harmony"), TOKENS)
GLM = Family(template_of("glm"), (*THINKING.tokens, ("<|assistant|>", False)))


async def test_gpt_oss_calls_in_a_message_of_its_own(tmp_path: Path) -> None:
    script = [" to=functions.", "get_weather", "<|channel|>", "commentary json", "<|message|>"]
    script += ['{"city": ', '"Oslo"}', "<eos>"]
    folder = chain_model_dir(tmp_path / "model", GPT_OSS, script, first="assistant")
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=16) as served:
        answer = await served.inference.Generate(asked(request_id="one"))
        streamed = summed(await heard(served, asked(request_id="one")))
        model = (await served.models.GetModel(model_messages.GetModelRequest())).model
    assert streamed == whole(answer)
    [call] = answer.tool_calls
    assert (call.name, json.loads(call.arguments_json)) == ("get_weather", {"city": "Oslo"})
    assert (answer.text, call.repaired) == ("", False)
    assert answer.finish_reason == usage_pb2.FINISH_REASON_TOOL_CALLS
    told = model.reply_format
    assert (told.calls, told.reasoning_start) == ("harmony", "<|channel|>analysis<|message|>")
    assert "the chat template writes calls so" in told.evidence[0] and not told.unread_markers


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["alone", "tools"])
async def test_gpt_oss_thinks_on_a_channel_of_its_own(tmp_path: Path, tools: list[Any]) -> None:
    script = ["<|channel|>", "analysis", "<|message|>", "rain?", "<|end|>", "Dry.", "<eos>"]
    folder = chain_model_dir(tmp_path / "model", GPT_OSS, script, first="assistant")
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=16) as served:
        answer = await served.inference.Generate(asked(tools=tools))
    assert (answer.reasoning, answer.text) == ("rain?", "Dry.")
    assert answer.usage.reasoning_tokens == 1


async def test_a_call_in_tags_keeps_its_white_space(tmp_path: Path) -> None:
    script = [
        "<tool_call>",
        "get_weather",
        "<arg_key>city</arg_key><arg_value>",
        "    Oslo\n",
        "</arg_value>",
    ]
    script += ["</tool_call>", "<eos>"]
    folder = chain_model_dir(tmp_path / "model", GLM, script, first="<|assistant|>")
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=16) as served:
        answer = await served.inference.Generate(asked())
    [call] = answer.tool_calls
    assert json.loads(call.arguments_json) == {"city": "    Oslo\n"}


async def test_a_call_that_was_repaired_says_so(tmp_path: Path) -> None:
    script = [
        "<tool_call>",
        '{"name": "get_weather", "parameters": ',
        '{"city": ',
        '"Oslo",}}',
        "</tool_call>",
    ]
    script += ["<eos>"]
    folder = chain_model_dir(tmp_path / "model", THINKING, script, first="Ċ")
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=16) as served:
        answer = await served.inference.Generate(asked(request_id="one"))
        told = [r.delta.tool_call for r in await heard(served, asked(request_id="one"))]
    [call] = answer.tool_calls
    assert (json.loads(call.arguments_json), call.repaired) == ({"city": "Oslo"}, True)
    assert [piece.repaired for piece in told if piece.ByteSize()][-1]
