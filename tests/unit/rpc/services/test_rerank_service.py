"""RerankService over the wire: what reaches the engine, the ranking that comes back, every misuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
from icehouse.v1 import cache_policy_pb2
from icehouse.v1 import rerank_service_pb2 as messages
from icehouse_server.domain.events import Delta, Event, Failed
from icehouse_server.domain.request import CacheUse, GenerationRequest, Logprob, LogprobsWanted, TokenLogprobs
from icehouse_server.errors import Overloaded, Reason

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO, finished, started
from tests.unit.rpc.conftest import RunningServer, running

YES, NO = ord("y"), ord("n")
ANSWERS = {"positive_answer": "y", "negative_answer": "n"}
TEXT = "{query}/{document}"


def vowels(request: GenerationRequest) -> Iterable[Event]:
    """Script: the more vowels a prompt has, the likelier its first answer."""
    yield started(request)
    assert request.logprobs is not None
    count = sum(chr(token_id) in "aeiou" for token_id in request.prompt_token_ids)
    values = (-0.5 * (9 - count), -0.25)
    asked = tuple(map(Logprob, request.logprobs.token_ids, values))
    yield Delta("", (5,), (TokenLogprobs(5, -0.1, 1, (), asked),))
    yield finished(request, output_token_count=1)


def rank(*documents: str, **fields: Any) -> messages.RerankRequest:
    return messages.RerankRequest(
        **{"query": "q", "text": TEXT, "documents": documents, **ANSWERS, **fields}  # type: ignore[arg-type]
    )


def in_turns(**fields: Any) -> messages.RerankRequest:
    request = rank("d", **fields)
    if not fields.get("turns"):
        request.ClearField("form")
    return request


@pytest.fixture
def ranker(served: RunningServer) -> RunningServer:
    served.engine.script = vowels
    return served


async def test_documents_come_back_best_first_with_their_probability(ranker: RunningServer) -> None:
    response = await ranker.reranking.Rerank(rank("xyz", "aeio", "a", "xa", request_id="mine"))
    assert [result.index for result in response.results] == [1, 2, 3, 0], "equals in the request's order"
    log_odds = [-0.5 * (9 - count) + 0.25 for count in (4, 1, 1, 0)]
    assert [result.log_odds for result in response.results] == pytest.approx(log_odds)
    scores = [1 / (1 + math.exp(-value)) for value in log_odds]
    assert [result.score for result in response.results] == pytest.approx(scores)
    assert [result.prompt_tokens for result in response.results] == [6, 3, 4, 5]
    assert (response.request_id, response.model) == ("mine", "tiny")
    assert (response.prompt_tokens, response.cached_tokens) == (18, 4 * 3)
    assert response.total_duration.ToNanoseconds() == 4_500_000_000


@pytest.mark.parametrize(("top_count", "places"), [(0, [1, 0, 2]), (1, [1]), (2, [1, 0]), (9, [1, 0, 2])])
async def test_only_the_best_are_returned(ranker: RunningServer, top_count: int, places: list[int]) -> None:
    response = await ranker.reranking.Rerank(rank("a", "aa", "x", top_count=top_count))
    assert [result.index for result in response.results] == places


async def test_what_rounds_to_certainty_is_still_told_apart(served: RunningServer) -> None:
    def sure(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        logprob = -200.0 - 100.0 * len(request.prompt_token_ids)
        asked = (Logprob(YES, 0.0), Logprob(NO, logprob))
        yield Delta(
            "",
            (5,),
            (TokenLogprobs(5, 0.0, 1, (), asked[::-1] if b"-"[0] in request.prompt_token_ids else asked),),
        )
        yield finished(request, output_token_count=1)

    served.engine.script = sure
    response = await served.reranking.Rerank(rank("x", "-", "xx", "--------"))
    assert [result.index for result in response.results] == [2, 0, 1, 3]
    assert [result.score for result in response.results][:2] == [1.0, 1.0]
    assert response.results[3].score == 0.0 and response.results[3].log_odds < -1000


async def test_the_engine_is_asked_for_one_token_of_each_the_longest_first(ranker: RunningServer) -> None:
    policy = cache_policy_pb2.CachePolicy(use=cache_policy_pb2.CACHE_USE_READ_ONLY, tenant="t")
    await ranker.reranking.Rerank(rank("a", "abc", request_id="mine", priority=3, cache=policy))
    [long, short] = ranker.engine.submitted
    assert (long.name, short.name) == ("mine", "mine#1")
    assert [bytes(r.prompt_token_ids) for r in (long, short)] == [b"q/abc", b"q/a"]
    for request in (long, short):
        assert request.logprobs == LogprobsWanted(token_ids=(YES, NO))
        assert (request.max_output_tokens, request.priority, request.tenant) == (1, 3, "t")
        assert request.sampling.temperature == 0.0 and request.sampling.ignores_end_tokens
        assert request.cache_use is CacheUse.READ_ONLY
    await ranker.reranking.Rerank(rank("a"))
    assert ranker.engine.submitted[-1].cache_use is CacheUse.READ_WRITE


async def test_places_are_filled_all_at_once(ranker: RunningServer) -> None:
    """What stands in a document is text, whatever it looks like."""
    form = "{instruction}|{query}|{document}|{other}"
    request = rank("{query}", query="{document}", instruction="i", text=form)
    await ranker.reranking.Rerank(request)
    assert bytes(ranker.engine.submitted[0].prompt_token_ids) == b"i|{document}|{query}|{other}"


async def test_without_a_form_the_prompt_is_the_one_that_rerankers_were_trained_with() -> None:
    roomy = dataclasses.replace(MODEL_INFO, context_token_limit=1000)
    async with running(info=roomy) as served:
        served.engine.script = vowels
        await served.reranking.Rerank(in_turns())
        [conversation] = served.tokenizer.conversations
        system, user = conversation.messages
        assert (system.role, user.role) == ("system", "user")
        assert system.content.startswith("Judge whether the Document meets the requirements")
        task = "Given a web search query, retrieve relevant passages that answer the query"
        assert user.content == f"<Instruct>: {task}\n<Query>: q\n<Document>: d"
        assert conversation.template_arguments == {"enable_thinking": False}


async def test_turns_of_the_callers_own_are_rendered(ranker: RunningServer) -> None:
    turns = messages.RerankTurns(user="{query}? {document}")
    await ranker.reranking.Rerank(in_turns(text=None, turns=turns))
    assert bytes(ranker.engine.submitted[0].prompt_token_ids) == b"user:q? d;"


@pytest.mark.parametrize(
    ("request_", "code", "reason", "field"),
    [
        (rank(), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "documents"),
        (rank(*["a"] * 129), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "documents"),
        (rank("a", query=""), "INVALID_ARGUMENT", "PROMPT_EMPTY", "query"),
        (rank("a", "", "b"), "INVALID_ARGUMENT", "PROMPT_EMPTY", "documents[1]"),
        (rank("a", "b" * 64), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "documents[1]"),
        (rank("a", top_count=-1), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "top_count"),
        (rank("a", text="{query}"), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "text"),
        (rank("a", text="{document}"), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "text"),
        (
            in_turns(text=None, turns=messages.RerankTurns(system="{query} {document}")),
            "INVALID_ARGUMENT",
            "PARAMETER_OUT_OF_RANGE",
            "turns.user",
        ),
        (
            in_turns(text=None, turns=messages.RerankTurns(user="{query}")),
            "INVALID_ARGUMENT",
            "PARAMETER_OUT_OF_RANGE",
            "turns",
        ),
        (rank("a", positive_answer="yes"), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "positive_answer"),
        (rank("a", negative_answer="no"), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "negative_answer"),
        (rank("a", negative_answer="y"), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "negative_answer"),
        (rank("a", priority=101), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "priority"),
        (rank("a", request_id="a b"), "INVALID_ARGUMENT", "PARAMETER_OUT_OF_RANGE", "request_id"),
        (
            rank("a", cache=cache_policy_pb2.CachePolicy(use=99)),  # type: ignore[arg-type]
            "INVALID_ARGUMENT",
            "PARAMETER_OUT_OF_RANGE",
            "cache.use",
        ),
        (rank("a", model="other"), "NOT_FOUND", "MODEL_NOT_FOUND", None),
        (rank("a", adapter="other"), "NOT_FOUND", "ADAPTER_NOT_FOUND", None),
    ],
)
async def test_misuse_is_named_before_anything_runs(
    ranker: RunningServer, request_: messages.RerankRequest, code: str, reason: str, field: str | None
) -> None:
    answer = await refused(ranker.reranking.Rerank(request_))
    assert (answer.code.name, answer.reason) == (code, reason)
    assert field is None or answer.field == field
    assert ranker.engine.submitted == []


async def test_an_answer_that_only_the_tokenizer_has_is_refused() -> None:
    async with running(info=dataclasses.replace(MODEL_INFO, vocabulary_size=YES)) as served:
        answer = await refused(served.reranking.Rerank(rank("a")))
        assert (answer.reason, answer.field) == ("PARAMETER_OUT_OF_RANGE", "positive_answer")


async def test_a_form_is_not_repeated_in_its_refusal(ranker: RunningServer) -> None:
    answer = await refused(ranker.reranking.Rerank(rank("a", text="my secret form {query}")))
    assert (
        answer.field == "text"
        and "{document}" in answer.message
        and "secret" not in f"{answer.message} {answer.info} {answer.bad_request}"
    )


async def test_two_forms_at_once_are_refused(ranker: RunningServer) -> None:
    both = (
        rank("a").SerializeToString()
        + messages.RerankRequest(turns=messages.RerankTurns(user="{query} {document}")).SerializeToString()
    )
    call: Any = ranker.channel.unary_unary("/icehouse.v1.RerankService/Rerank")
    answer = await refused(call(both))
    assert (answer.code.name, answer.reason) == ("INVALID_ARGUMENT", "PROMPT_AMBIGUOUS")


async def test_a_model_without_a_template_wants_a_form_in_text() -> None:
    async with running(info=dataclasses.replace(MODEL_INFO, has_chat_template=False)) as served:
        served.engine.script = vowels
        answer = await refused(served.reranking.Rerank(in_turns()))
        assert (answer.reason, answer.field) == ("CHAT_TEMPLATE_MISSING", "text")
        assert len((await served.reranking.Rerank(rank("a"))).results) == 1


async def test_a_template_that_thinks_first_is_refused(
    ranker: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = ranker.tokenizer.render_chat
    monkeypatch.setattr(
        ranker.tokenizer,
        "render_chat",
        lambda conversation, kept: dataclasses.replace(render(conversation, kept), is_reasoning=True),
    )
    turns = messages.RerankTurns(user="{query}? {document}")
    answer = await refused(ranker.reranking.Rerank(in_turns(text=None, turns=turns)))
    assert (answer.reason, answer.field) == ("CHAT_INVALID", "turns")
    assert ranker.engine.submitted == []


async def test_one_document_that_fails_ends_the_call_and_the_others(served: RunningServer) -> None:
    def failing(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        if request.request_id == "mine#1":
            yield Failed(Overloaded(Reason.MEMORY_SHORT, "no room", retry_after_s=1.0))

    served.engine.script = failing
    answer = await refused(served.reranking.Rerank(rank("aaa", "aa", "a", request_id="mine")))
    assert answer.reason == "MEMORY_SHORT"
    assert {await served.cancelled(), await served.cancelled()} == {"mine", "mine#2"}
