"""RerankService: Rerank."""

from __future__ import annotations

import dataclasses
import math

from icehouse.v1 import rerank_service_pb2 as messages
from icehouse.v1 import rerank_service_pb2_grpc

from icehouse_server.domain.call import Operation
from icehouse_server.domain.events import Delta, Event, Finished
from icehouse_server.domain.request import LogprobsWanted
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.rpc.calls.calls import Call, Context
from icehouse_server.rpc.engine_client.ports import ServedModel
from icehouse_server.rpc.messages.proto_map import duration_proto
from icehouse_server.rpc.messages.validation import refuse_value
from icehouse_server.rpc.services.parts import ServiceParts
from icehouse_server.rpc.services.prepared import requests_together
from icehouse_server.rpc.services.prompts import names_item
from icehouse_server.rpc.services.rerank_prompt import (
    DEFAULT_ANSWERS,
    RerankForm,
    answers_of,
    check_begins_with_answer,
    form_of,
)


class RerankService(rerank_service_pb2_grpc.RerankServiceServicer):
    """Each document runs through the engine like a prompt that wants one token."""

    def __init__(self, parts: ServiceParts) -> None:
        self._config = parts.config
        self._calls = parts.calls
        self._generation = parts.generation
        self._router = parts.router
        self._prompts = parts.prompts

    async def Rerank(self, request: messages.RerankRequest, context: Context) -> messages.RerankResponse:
        """Answer with the documents, best first."""
        async with self._calls.call("Rerank", context, Operation.RERANK) as call:
            model = self._router.require_model()
            whole = self._generation.request_of(request, policy=request.cache, model=model, call=call)
            form = self._check(request, model)
            whole = dataclasses.replace(
                whole,
                max_output_tokens=1,
                # An end token is not shown; here it only says that neither answer was the likeliest token.
                sampling=SamplingParams(ignores_end_tokens=True),
                logprobs=LogprobsWanted(token_ids=await self._answers(request, model)),
            )
            prompts = await self._read(request, form, model, call)
            order, requests = requests_together(whole, prompts)
            ranking = _Ranking(whole.name, model.info.model_id, prompts)
            async with self._generation.run(requests, call=call) as events:
                async for rank, event in events:
                    ranking.note(order[rank], event)
            return ranking.response(top_count=request.top_count)

    def _check(self, request: messages.RerankRequest, model: ServedModel) -> RerankForm:
        """Refuse what needs no tokenizer to be refused."""
        limit = self._config.max_rerank_documents
        if not 1 <= len(request.documents) <= limit:
            refuse_value("documents", len(request.documents), f"1 to {limit} documents", unit="documents")
        if request.top_count < 0:
            refuse_value("top_count", request.top_count, "1 or more, or absent")
        return form_of(request, model.info)

    async def _answers(self, request: messages.RerankRequest, model: ServedModel) -> tuple[int, int]:
        texts = (request.positive_answer or DEFAULT_ANSWERS[0], request.negative_answer or DEFAULT_ANSWERS[1])
        positive, negative = await self._prompts.run(lambda: [model.tokenizer.spell(text) for text in texts])
        return answers_of(positive, negative, vocabulary_size=model.info.vocabulary_size)

    async def _read(
        self, request: messages.RerankRequest, form: RerankForm, model: ServedModel, call: Call
    ) -> list[tuple[int, ...]]:
        """Return the tokens of every prompt; raises InvalidRequest that names the document at fault."""
        prompts: list[tuple[int, ...]] = []
        for index, document in enumerate(request.documents):
            with names_item(f"documents[{index}]", names_field=False):
                prompt = await self._prompts.read(form.unchecked(document), model)
            # The form's fault, not the document's.
            check_begins_with_answer(prompt)
            prompts.append(prompt.token_ids)
        call.prompt_token_count = sum(map(len, prompts))
        return prompts


class _Ranking:
    """What the engine has told of the documents so far."""

    def __init__(self, request_id: str, model_id: str, prompts: list[tuple[int, ...]]) -> None:
        self._request_id = request_id
        self._model_id = model_id
        self._prompts = prompts
        self._log_odds: dict[int, float] = {}
        self._cached_token_count = 0
        self._total_s = 0.0

    def note(self, index: int, event: Event) -> None:
        """Take an event of one document's request."""
        if isinstance(event, Delta) and event.logprobs:
            positive, negative = event.logprobs[0].asked
            self._log_odds[index] = positive.logprob - negative.logprob
        if isinstance(event, Finished):
            assert index in self._log_odds, "a document ended without its score"
            self._cached_token_count += event.usage.cache.cached_token_count
            self._total_s = max(self._total_s, event.usage.total_s)

    def response(self, *, top_count: int) -> messages.RerankResponse:
        """Return the `top_count` best, or all for 0."""
        best = sorted(self._log_odds.items(), key=lambda item: (-item[1], item[0]))
        return messages.RerankResponse(
            request_id=self._request_id,
            model=self._model_id,
            results=[
                messages.RerankResult(
                    index=index,
                    score=_logistic(log_odds),
                    log_odds=log_odds,
                    prompt_tokens=len(self._prompts[index]),
                )
                for index, log_odds in best[: top_count or None]
            ],
            prompt_tokens=sum(map(len, self._prompts)),
            cached_tokens=self._cached_token_count,
            total_duration=duration_proto(self._total_s),
        )


def _logistic(log_odds: float) -> float:
    # Written for either sign, so that no power overflows.
    if log_odds >= 0:
        return 1.0 / (1.0 + math.exp(-log_odds))
    power = math.exp(log_odds)
    return power / (1.0 + power)
