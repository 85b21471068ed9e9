"""Speculation as a request asks for it: what reaches the engine, and every misuse named."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import speculation_pb2
from icehouse_server.domain.request import Drafting, Speculation, SpeculationLimit

from tests.fixtures.rpc.details import refused
from tests.unit.rpc.conftest import RunningServer

LOOKUP = speculation_pb2.PromptLookup()


def request(**fields: Any) -> messages.GenerateRequest:
    return messages.GenerateRequest(
        prompt={"text": "Hi"}, max_output_tokens=2, speculation=speculation_pb2.Speculation(**fields)
    )


async def test_it_reaches_the_engine_and_is_off_unless_asked_for(served: RunningServer) -> None:
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=2))
    await served.inference.Generate(request(prompt_lookup=LOOKUP))
    asked = speculation_pb2.PromptLookup(max_ngram_tokens=8)
    assert [
        event async for event in served.inference.Stream(request(prompt_lookup=asked, max_draft_tokens=1))
    ]
    await served.inference.Generate(request(draft_model=speculation_pb2.DraftModel()))
    assert [submitted.speculation for submitted in served.engine.submitted] == [
        None,
        Speculation(draft_token_limit=8, ngram_token_limit=3),
        Speculation(draft_token_limit=1, ngram_token_limit=8),
        Speculation(draft_token_limit=4, drafting=Drafting.DRAFT_MODEL),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "speculation"),
        ({"max_draft_tokens": 4}, "speculation"),
        (
            {"draft_model": speculation_pb2.DraftModel(), "max_draft_tokens": 17},
            "speculation.max_draft_tokens",
        ),
        ({"prompt_lookup": LOOKUP, "max_draft_tokens": -1}, "speculation.max_draft_tokens"),
        ({"prompt_lookup": LOOKUP, "max_draft_tokens": 17}, "speculation.max_draft_tokens"),
        (
            {"prompt_lookup": speculation_pb2.PromptLookup(max_ngram_tokens=9)},
            "speculation.prompt_lookup.max_ngram_tokens",
        ),
        (
            {"prompt_lookup": speculation_pb2.PromptLookup(max_ngram_tokens=-1)},
            "speculation.prompt_lookup.max_ngram_tokens",
        ),
    ],
)
async def test_misuse_is_named_before_anything_runs(
    served: RunningServer, fields: dict[str, Any], field: str
) -> None:
    answer = await refused(served.inference.Generate(request(**fields)))
    assert (answer.code, answer.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PARAMETER_OUT_OF_RANGE")
    assert answer.field == field
    assert served.engine.submitted == []


def test_every_limit_has_a_value_of_its_own_in_the_api() -> None:
    named = {limit.name for limit in SpeculationLimit if limit is not SpeculationLimit.NONE}
    names = {f"SPECULATION_LIMIT_{name}" for name in ("UNSPECIFIED", *named)}
    assert names == set(speculation_pb2.SpeculationLimit.keys())
