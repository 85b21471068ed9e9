"""A gap is filled through the whole house, and what stands before it is found in the cache."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2, tool_pb2, usage_pb2

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.chat_templates import REMEMBERING
from tests.fixtures.rpc.details import refused
from tests.fixtures.whole_server import whole_server

SCRIPT = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", " a", " + b", "<fim_pad>", "never")
BEFORE = "def add(a, b):\n    return"


def gap(suffix: str = "\n", **fields: int) -> messages.GenerateRequest:
    infill = prompt_pb2.InfillPrompt(prefix=BEFORE, suffix=suffix)
    return messages.GenerateRequest(prompt={"infill": infill}, max_output_tokens=8, **fields)


async def test_a_gap_is_filled_from_its_two_sides(tmp_path: Path) -> None:
    folder = chain_model_dir(tmp_path / "model", REMEMBERING, SCRIPT, first="Ċ")
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=8) as served:
        answer = await served.inference.Generate(gap())
        assert (answer.text, answer.finish_reason) == (" a + b", usage_pb2.FINISH_REASON_STOP_TOKEN)
        assert answer.stop_token_id == answer.token_ids[-1]
        tokens = (await served.inference.Tokenize(messages.TokenizeRequest(prompt=gap().prompt))).tokens
        pieces = [token.piece for token in tokens]
        assert pieces[:2] == ["<bos>", "<fim_prefix>"] and pieces[-3:] == [
            "<fim_suffix>",
            "Ċ",
            "<fim_middle>",
        ]
        again = prompt_pb2.TokenPrompt(ids=[token.id for token in tokens])
        by_tokens = await served.inference.Generate(
            messages.GenerateRequest(prompt={"tokens": again}, max_output_tokens=2)
        )
        assert by_tokens.text == answer.text and by_tokens.usage.cached_tokens == len(tokens) - 1
        other = await served.inference.Generate(gap("  # the sum\n"))
        assert other.text == answer.text
        assert other.usage.cached_tokens >= pieces.index("<fim_suffix>"), "what stands before is the same"
        with_tools = gap()
        with_tools.prompt.tools.append(tool_pb2.Tool(name="f"))
        assert (await refused(served.inference.Generate(with_tools))).reason == "TOOL_INVALID"


async def test_a_model_that_fills_no_gaps_says_so(tmp_path: Path) -> None:
    async with whole_server(tiny_model_dir(tmp_path / "model", "llama"), tmp_path / "blocks") as served:
        for call in (
            served.inference.Generate(gap()),
            served.inference.Tokenize(messages.TokenizeRequest(prompt=gap().prompt)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "infill" in str(caught.value.details())
