"""EmbeddingService over the wire: what reaches the engine, the vectors that come back, every misuse."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import numpy as np
import pytest
from icehouse.v1 import embedding_service_pb2 as messages
from icehouse.v1 import prompt_pb2
from icehouse_server.domain.events import Event, Failed
from icehouse_server.domain.request import CacheUse, GenerationRequest, Pooling
from icehouse_server.errors import Overloaded, Reason

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, finished, started
from tests.unit.rpc.conftest import RunningServer, running

SIZE = 4
EMBEDDING = dataclasses.replace(MODEL_INFO, embedding_size=SIZE)


def vector_of(length: int) -> np.ndarray:
    return np.array([3.0, 4.0, float(length), 1.0], np.float32)


def embedding(request: GenerationRequest) -> Iterable[Event]:
    """Script: a vector that tells the input's length."""
    yield started(request)
    vector = vector_of(len(request.prompt_token_ids))
    yield dataclasses.replace(finished(request), embedding=vector)


def texts(*inputs: str, **fields: Any) -> messages.EmbedRequest:
    return messages.EmbedRequest(inputs=[messages.EmbedInput(text=text) for text in inputs], **fields)


@pytest.fixture
async def embedder() -> AsyncIterator[RunningServer]:
    """A server whose model shows hidden states."""
    async with running(info=EMBEDDING) as served:
        served.engine.script = embedding
        yield served


async def test_each_input_gets_its_own_vector_in_its_own_place(embedder: RunningServer) -> None:
    request = texts("ab", "abcdef", "a", normalize=False, request_id="mine")
    request.inputs.add(tokens=prompt_pb2.TokenPrompt(ids=[7, 8, 9]))
    response = await embedder.embeddings.Embed(request)
    lengths = [2, 6, 1, 3]
    assert [list(e.values) for e in response.embeddings] == [vector_of(length).tolist() for length in lengths]
    assert [e.prompt_tokens for e in response.embeddings] == lengths
    assert (response.request_id, response.model, response.prompt_tokens) == ("mine", "tiny", sum(lengths))
    assert response.total_duration.ToNanoseconds() == 4_500_000_000


async def test_the_engine_gets_the_longest_first_and_keeps_nothing(embedder: RunningServer) -> None:
    await embedder.embeddings.Embed(texts("ab", "abcdef", request_id="mine", priority=3))
    await embedder.embeddings.Embed(texts("ab", pooling=messages.POOLING_MEAN))
    [long, short, mean] = embedder.engine.submitted
    assert (long.request_id, short.request_id) == ("mine", "mine#1")
    assert (len(long.prompt_token_ids), len(short.prompt_token_ids), long.priority) == (6, 2, 3)
    assert (long.pooling, mean.pooling) == (Pooling.LAST_TOKEN, Pooling.MEAN)
    assert {r.cache_use for r in (long, short, mean)} == {CacheUse.OFF}
    assert {r.max_output_tokens for r in (long, short, mean)} == {0}


async def test_vectors_have_length_one_unless_told_otherwise_and_are_cut_before(
    embedder: RunningServer,
) -> None:
    [whole] = (await embedder.embeddings.Embed(texts("ab"))).embeddings
    [cut] = (await embedder.embeddings.Embed(texts("ab", dimensions=2))).embeddings
    assert np.linalg.norm(whole.values) == pytest.approx(1.0) and len(whole.values) == SIZE
    assert list(cut.values) == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("request_", "code", "reason", "field"),
    [
        (texts(), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "inputs"),
        (texts(*["a"] * 65), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "inputs"),
        (texts("a", dimensions=SIZE + 1), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "dimensions"),
        (texts("a", dimensions=-1), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "dimensions"),
        (texts("a", pooling=9), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "pooling"),
        (texts("a", priority=101), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "priority"),
        (texts("a", model="other"), "NOT_FOUND", "MODEL_NOT_FOUND", None),
        (texts("a", adapter="other"), "NOT_FOUND", "ADAPTER_NOT_FOUND", None),
        (texts("a", "", "b"), "INVALID_ARGUMENT", "PROMPT_EMPTY", "inputs[1].text"),
        (texts("a", "b" * 64), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "inputs[1].text"),
        (
            messages.EmbedRequest(inputs=[messages.EmbedInput()]),
            "INVALID_ARGUMENT",
            "PROMPT_MISSING",
            "inputs[0].prompt",
        ),
        (
            messages.EmbedRequest(inputs=[messages.EmbedInput(tokens=prompt_pb2.TokenPrompt(ids=[300]))]),
            "INVALID_ARGUMENT",
            "TOKEN_OUT_OF_RANGE",
            None,
        ),
    ],
)
async def test_misuse_is_named_before_anything_runs(
    embedder: RunningServer, request_: messages.EmbedRequest, code: str, reason: str, field: str | None
) -> None:
    answer = await refused(embedder.embeddings.Embed(request_))
    assert (answer.code.name, answer.reason) == (code, reason)
    assert field is None or answer.field == field
    assert embedder.engine.submitted == []


async def test_a_model_without_hidden_states_says_so(served: RunningServer) -> None:
    answer = await refused(served.embeddings.Embed(texts("a")))
    assert (answer.code, answer.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EMBEDDING_UNSUPPORTED")


async def test_one_input_that_fails_ends_the_call_with_its_reason(embedder: RunningServer) -> None:
    def failing(request: GenerationRequest) -> Iterable[Event]:
        if len(request.prompt_token_ids) == 1:
            yield Failed(Overloaded(Reason.MEMORY_SHORT, "no memory now", retry_after_s=1.0))
        else:
            yield started(request)

    embedder.engine.script = failing
    answer = await refused(embedder.embeddings.Embed(texts("abc", "a")))
    assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY_SHORT")
    assert await embedder.cancelled(), "the other input is not computed for nobody"
