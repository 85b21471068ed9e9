"""Several outputs of one prompt: one prefill, and each the same as by a request of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import server_service_pb2

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.rpc.details import refused
from tests.fixtures.whole_server import WholeServer, whole_server

PROMPT = [3 + (i * 7 + i * i) % 290 for i in range(75)]
BLOCK = 32
SEED = 5
SAMPLING = {"temperature": 1.2, "seed": SEED, "repetition_penalty": 1.3, "ignore_end_tokens": True}


def asked(**fields: Any) -> messages.GenerateRequest:
    whole = {"prompt": {"tokens": {"ids": PROMPT}}, "max_output_tokens": 12, "sampling": SAMPLING, **fields}
    return ParseDict(whole, messages.GenerateRequest())


async def alone(served: WholeServer, *, count: int) -> list[list[int]]:
    """Ask for each completion by itself, with nothing from the cache."""
    answers = []
    for index in range(count):
        request = asked(sampling=SAMPLING | {"seed": SEED + index}, cache={"use": "CACHE_USE_OFF"})
        answers.append(list((await served.inference.Generate(request)).token_ids))
    return answers


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1", "qwen3_next"])
async def test_the_prompt_is_computed_once(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    async with whole_server(folder, tmp_path / "ssd", cache__block_token_count=BLOCK) as served:
        response = await served.inference.Generate(asked(completions=4))
        stats = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats.engine
        told = [list(completion.token_ids) for completion in response.completions]
        assert told == await alone(served, count=4)
    assert len({tuple(tokens) for tokens in told}) == 4, "each has a seed of its own"
    assert list(response.token_ids) == told[0]
    assert [c.cache.cached_tokens for c in response.completions] == [0, *[len(PROMPT) - 1] * 3]
    assert stats.prefilled_token_total == len(PROMPT) - 1


@pytest.mark.parametrize("use", ["CACHE_USE_OFF", "CACHE_USE_READ_ONLY"])
async def test_without_the_cache_they_are_the_same(tmp_path: Path, use: str) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    async with whole_server(folder, tmp_path / "ssd", cache__block_token_count=BLOCK) as served:
        response = await served.inference.Generate(asked(completions=3, cache={"use": use}))
        assert [list(c.token_ids) for c in response.completions] == await alone(served, count=3)
    assert [c.cache.cached_tokens for c in response.completions] == [0, 0, 0]


async def test_a_stream_of_several_says_what_generate_says(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    request = asked(completions=3, logprobs={"top_count": 1, "prompt": True})
    async with whole_server(folder, tmp_path / "ssd", cache__block_token_count=BLOCK) as served:
        answer = await served.inference.Generate(request)
        responses = [response async for response in served.inference.Stream(request)]
    assert len(answer.prompt_logprobs) == len(PROMPT) - 1
    for completion in answer.completions:
        deltas = [
            r.delta for r in responses if r.HasField("delta") and r.delta.completion_index == completion.index
        ]
        assert "".join(delta.text for delta in deltas) == completion.text
        assert [i for delta in deltas for i in delta.token_ids] == list(completion.token_ids)
        assert [e for delta in deltas for e in delta.logprobs] == list(completion.logprobs)
        assert len(completion.logprobs) == 12


async def test_each_keeps_to_the_response_format(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    texts = ["red", "rust", "green", "grey"]
    form = {"choice": {"texts": texts}}
    async with whole_server(folder, tmp_path / "ssd", cache__block_token_count=BLOCK) as served:
        sampling = {"temperature": 5.0, "seed": SEED}
        response = await served.inference.Generate(
            asked(completions=8, response_format=form, sampling=sampling)
        )
    told = [completion.text for completion in response.completions]
    assert set(told) <= set(texts) and len(set(told)) > 1


async def test_more_than_the_queue_holds_are_refused_together(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    async with whole_server(folder, tmp_path / "ssd", engine__waiting_limit=2) as served:
        refusal = await refused(served.inference.Generate(asked(completions=3)))
        assert (refusal.reason, refusal.field) == ("PARAMETER_OUT_OF_RANGE", "completions")
        assert len((await served.inference.Generate(asked(completions=2))).completions) == 2
