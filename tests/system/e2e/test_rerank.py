"""Rerank in a whole house: the scores of a direct computation, beside other requests, cold and cached."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse.v1 import cache_policy_pb2
from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import rerank_service_pb2 as messages

from tests.fixtures.models import build, tiny_model_dir
from tests.fixtures.whole_server import WholeServer, whole_server

QUERY = "What does an ice house keep, and for how long does it keep it? " * 4
DOCUMENTS = ("Ice, until late summer.", "Tea.", "It stands by the lake. " * 20, "Straw.", "Tea.")
FORM = "{query}\n\nIs this an answer: {document}\n"


async def token_ids(served: WholeServer, text: str) -> list[int]:
    answer = await served.inference.Tokenize(inference.TokenizeRequest(prompt={"text": text}))
    return [token.id for token in answer.tokens]


async def expected(served: WholeServer, architecture: str) -> list[float]:
    """Return each document's log odds from one pass over its prompt."""
    model: Any = build(architecture)
    # A start token may come first.
    yes, no = (await token_ids(served, "y"))[-1], (await token_ids(served, "n"))[-1]
    found = []
    for document in DOCUMENTS:
        prompt = FORM.replace("{query}", QUERY).replace("{document}", document)
        logits = np.array(model(mx.array([await token_ids(served, prompt)]))[0, -1])
        found.append(float(logits[yes] - logits[no]))
    return found


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1"])
async def test_scores_are_the_models_own_in_any_company_and_from_any_tier(
    tmp_path: Path, architecture: str
) -> None:
    request = messages.RerankRequest(
        query=QUERY, documents=DOCUMENTS, text=FORM, positive_answer="y", negative_answer="n"
    )
    uncached = messages.RerankRequest()
    uncached.CopyFrom(request)
    uncached.cache.use = cache_policy_pb2.CACHE_USE_OFF
    async with whole_server(
        tiny_model_dir(tmp_path, architecture), tmp_path / "blocks", cache__block_token_count=32
    ) as served:
        log_odds = await expected(served, architecture)
        beside = [
            asyncio.ensure_future(
                served.inference.Generate(
                    inference.GenerateRequest(prompt={"text": f"{i}"}, max_output_tokens=40)
                )
            )
            for i in range(3)
        ]
        cold = await served.reranking.Rerank(request)
        again = await served.reranking.Rerank(request)
        off = await served.reranking.Rerank(uncached)
        await asyncio.gather(*beside)
    for answer in (cold, again, off):
        told = {result.index: result.log_odds for result in answer.results}
        assert [told[index] for index in range(len(DOCUMENTS))] == pytest.approx(log_odds, abs=2e-3)
        odds = [result.log_odds for result in answer.results]
        assert odds == sorted(odds, reverse=True)
    assert off.cached_tokens == 0
    assert again.cached_tokens > 0.9 * again.prompt_tokens
    if architecture != "falcon_h1":  # which can resume at its checkpoints only
        # The query is the same for all: computed for the first, known to the others.
        query_tokens = min(result.prompt_tokens for result in cold.results)
        assert cold.cached_tokens >= 0.5 * (len(DOCUMENTS) - 1) * query_tokens
