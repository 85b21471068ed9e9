"""Completions, embeddings and rankings, before a real server with a tiny model."""

from __future__ import annotations

import base64
import struct
from typing import Any

import openai
import pytest
from icehouse_client import AsyncClient

from clients.http.tests.fronts import HttpFront
from tests.unit.rpc.conftest import RunningServer

TEXT = "The quick brown fox jumps over the lazy dog"
ASKED: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "temperature": 0}


async def test_a_completion_is_the_same_streamed_and_whole(whole: HttpFront) -> None:
    create = whole.openai.completions.create
    answer = await create(**ASKED, logprobs=1)
    [choice] = answer.choices
    assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 8)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == 8
    chunks = [chunk async for chunk in await create(**ASKED, logprobs=1, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text != ""
    told = [token for chunk in chunks if (lp := chunk.choices[0].logprobs) for token in lp.tokens]
    assert told == choice.logprobs.tokens


async def test_tokens_are_a_prompt_and_the_prompt_is_repeated(whole: HttpFront) -> None:
    create = whole.openai.completions.create
    plain = (await create(**ASKED)).choices[0].text
    async with AsyncClient(whole.address) as client:
        ids = [token.id for token in await client.tokenize(TEXT)]
        spelled = await client.detokenize(ids)
    assert (await create(**{**ASKED, "prompt": ids, "echo": True})).choices[0].text == spelled + plain
    streamed = await create(**{**ASKED, "prompt": [TEXT], "echo": True}, n=2, stream=True)
    texts = ["", ""]
    async for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT + plain] * 2


async def test_a_suffix_makes_a_gap(front: HttpFront, served: RunningServer) -> None:
    await front.openai.completions.create(model="tiny", prompt="ab", suffix="c", max_tokens=1)
    [request] = served.engine.submitted
    assert request.prompt_token_ids == (256, *b"ab", 257, *b"c", 258)


async def test_embeddings_as_numbers_and_packed(whole: HttpFront) -> None:
    async with AsyncClient(whole.address) as client:
        vectors = await client.embed(["ice", "steam"])
        ids = [[token.id for token in await client.tokenize(text)] for text in ("ice", "steam")]
        small = await client.embed(["ice"], dimensions=4)
    create = whole.openai.embeddings.create
    for given in (["ice", "steam"], ids):
        # OpenAI's own client asks for base64.
        answer = await create(model="any", input=given)
        for entry, vector in zip(answer.data, vectors, strict=True):
            assert entry.embedding == pytest.approx(vector, abs=1e-5)
    assert answer.usage.prompt_tokens == vectors.prompt_tokens and answer.model == "tiny"
    one = await create(model="any", input="ice", dimensions=4, encoding_format="float")
    assert one.data[0].embedding == pytest.approx(small[0], abs=1e-5)
    raw = {"model": "any", "input": "ice", "encoding_format": "base64"}
    packed = (await whole.http.post("/v1/embeddings", json=raw)).json()["data"][0]["embedding"]
    assert struct.unpack("<4f", base64.b64decode(packed)[:16]) == pytest.approx(vectors[0][:4], abs=1e-5)


async def test_an_input_that_cannot_be_embedded_is_named(whole: HttpFront) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await whole.openai.embeddings.create(model="any", input=["ice", ""])
    assert caught.value.param == "input[1]"


async def test_documents_are_ranked(whole: HttpFront) -> None:
    documents = ["water", "stone", "wind"]
    # The tiny vocabulary spells "yes" in two tokens.
    answers: Any = {"positive_answer": "y", "negative_answer": "n"}
    async with AsyncClient(whole.address) as client:
        ranking = await client.rerank("ice", documents, **answers)
    asked = {"model": "any", "query": "ice", "documents": documents, **answers}
    for path in ("/v1/rerank", "/v2/rerank"):
        answer = (await whole.http.post(path, json=asked)).json()
        assert [result["index"] for result in answer["results"]] == [ranked.index for ranked in ranking]
    best = ranking[0]
    asked |= {"top_n": 1, "return_documents": True, "documents": [{"text": text} for text in documents]}
    [result] = (await whole.http.post("/v1/rerank", json=asked)).json()["results"]
    assert result["document"] == {"text": documents[best.index]}
    assert result["relevance_score"] == pytest.approx(best.score, abs=1e-3)


async def test_what_is_no_prompt_is_refused(front: HttpFront) -> None:
    for prompt in (["a", "b"], [[1], [2]], [], [-1], [True], 7, {"a": 1}):
        with pytest.raises(openai.BadRequestError) as caught:
            await front.openai.completions.create(model="tiny", prompt=prompt)
        assert caught.value.param == "prompt"
