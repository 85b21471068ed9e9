"""RerankService: a query and each document become a prompt, and the first output token gives the score."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from icehouse.v1 import rerank_service_pb2 as messages
from icehouse.v1 import rerank_service_pb2_grpc

from icehouse_server.domain.call import Operation
from icehouse_server.domain.chat import ChatMessage, Conversation
from icehouse_server.domain.events import Delta, Finished
from icehouse_server.domain.model import ModelInfo, ModelKind
from icehouse_server.domain.request import CacheUse, LogprobsWanted, Pooling
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.calls.call_lifecycle import Context, RpcCall
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.messages.field_checks import names_item, refuse_value
from icehouse_server.rpc.messages.proto_map import duration_proto
from icehouse_server.rpc.services.generation import Service
from icehouse_server.rpc.services.prompts import Chat, Pair, Text, UncheckedPrompt


class RerankService(Service, rerank_service_pb2_grpc.RerankServiceServicer):
    """Each document runs through the engine like a prompt with one output token."""

    async def Rerank(self, request: messages.RerankRequest, context: Context) -> messages.RerankResponse:
        async with self._calls.call(context, Operation.RERANK) as call:
            model = await self._generation.use_for(request, call)
            whole = self._generation.request_of(request, model=model, call=call, wanted=ModelKind.RERANK)
            form = self._check(request, model)
            if isinstance(form, PairForm):
                whole = dataclasses.replace(whole, cache_use=CacheUse.OFF, pooling=Pooling.OWN)
            else:
                whole = dataclasses.replace(
                    whole,
                    max_output_tokens=1,
                    # End tokens are hidden; here one only means that neither answer was the likeliest token.
                    sampling=SamplingParams(ignores_end_tokens=True),
                    logprobs=LogprobsWanted(token_ids=await self._answers(request, model)),
                )
            prompts = await self._read(request, form, model, call)
            log_odds: dict[int, float] = {}
            cached_token_count, total_s = 0, 0.0
            async with self._generation.run_each(whole, prompts, call=call) as events:
                async for index, event in events:
                    if isinstance(event, Delta) and event.logprobs:
                        positive, negative = event.logprobs[0].asked
                        log_odds[index] = positive.logprob - negative.logprob
                    if isinstance(event, Finished):
                        if event.embedding is not None:
                            log_odds[index] = float(event.embedding[0])
                        assert index in log_odds, "a document ended without its score"
                        cached_token_count += event.usage.cache.cached_token_count
                        total_s = max(total_s, event.usage.total_s)
            best = sorted(log_odds.items(), key=lambda item: (-item[1], item[0]))
            return messages.RerankResponse(
                request_id=whole.name,
                model=model.info.model_id,
                results=[
                    messages.RerankResult(
                        index=index, score=_logistic(odds), log_odds=odds, prompt_tokens=len(prompts[index])
                    )
                    for index, odds in best[: request.top_count or None]
                ],
                prompt_tokens=sum(map(len, prompts)),
                cached_tokens=cached_token_count,
                total_duration=duration_proto(total_s),
            )

    def _check(self, request: messages.RerankRequest, model: ServedModel) -> RerankForm | PairForm:
        limit = self._config.max_rerank_documents
        if not 1 <= len(request.documents) <= limit:
            refuse_value("documents", len(request.documents), f"1 to {limit} documents", unit="documents")
        if request.top_count < 0:
            refuse_value("top_count", request.top_count, "1 or more, or absent")
        if not request.query:
            raise InvalidRequest(Reason.PROMPT_EMPTY, "`query` is empty; say what to rank for", field="query")
        is_scored = model.info.kind is ModelKind.RERANK
        return pair_form_of(request) if is_scored else form_of(request, model.info)

    async def _answers(self, request: messages.RerankRequest, model: ServedModel) -> tuple[int, int]:
        """Return the tokens of the two answers; raises InvalidRequest unless each is one token."""
        texts = (request.positive_answer or DEFAULT_ANSWERS[0], request.negative_answer or DEFAULT_ANSWERS[1])
        positive, negative = await self._prompts.run(lambda: [model.tokenizer.spell(text) for text in texts])
        size = model.info.vocabulary_size
        for field, spelling in (("positive_answer", positive), ("negative_answer", negative)):
            if len(spelling) != 1:
                refuse_value(field, len(spelling), "spelled by one token of the model", unit="tokens")
            if spelling[0] >= size:
                refuse_value(field, spelling[0], f"spelled by a token below {size}")
        if positive == negative:
            refuse_value("negative_answer", negative[0], "another token than the positive answer")
        return positive[0], negative[0]

    async def _read(
        self, request: messages.RerankRequest, form: RerankForm | PairForm, model: ServedModel, call: RpcCall
    ) -> list[tuple[int, ...]]:
        """Return the tokens of every prompt; raises InvalidRequest that names the faulty document."""
        prompts: list[tuple[int, ...]] = []
        for index, document in enumerate(request.documents):
            with names_item(f"documents[{index}]", names_field=False):
                prompt = await self._prompts.read(form.unchecked(document), model)
            if prompt.chat is not None and prompt.chat.rendered.is_reasoning:
                # The form is at fault, not the document.
                raise InvalidRequest(
                    Reason.CHAT_INVALID,
                    "the model's chat template lets every reply begin with reasoning, so its first token is "
                    "not an answer; set `text` to a prompt of your own",
                    field="turns",
                )
            prompts.append(prompt.token_ids)
        call.prompt_token_count = sum(map(len, prompts))
        return prompts


def _logistic(log_odds: float) -> float:
    # One case per sign, so that no power overflows.
    if log_odds >= 0:
        return 1.0 / (1.0 + math.exp(-log_odds))
    power = math.exp(log_odds)
    return power / (1.0 + power)


DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
DEFAULT_ANSWERS = ("yes", "no")

_DEFAULT_TURNS = messages.RerankTurns(
    system=(
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    ),
    user="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
)
"""The prompt that Qwen3-Reranker was trained with, from its model card; its template adds the rest."""

_FORM_LENGTH_LIMIT = 256 << 10
_LENGTH_LIMIT = 4 << 20
"""Characters in one document's prompt; more would not fit into a context of a million tokens."""

_NO_THINKING: Mapping[str, bool] = {"enable_thinking": False}
_PLACEHOLDERS = re.compile(r"\{(instruction|query|document)\}")


@dataclasses.dataclass(frozen=True, slots=True)
class RerankForm:
    """The request's form with all values except the document. `turns` is None for plain text."""

    turns: messages.RerankTurns | None
    text: str
    known: Mapping[str, str]

    def unchecked(self, document: str) -> UncheckedPrompt:
        """Return the prompt that asks about one document; raises InvalidRequest if it is too long.

        A form may repeat a placeholder many times, so the length is computed before the form is filled.
        """
        size = sum(_filled_length(text, self._values(document)) for text in self._texts)
        if size > _LENGTH_LIMIT:
            raise InvalidRequest(
                Reason.PROMPT_TOO_LONG,
                f"its prompt would have {size} characters; the limit is {_LENGTH_LIMIT}",
                field="documents",
                metadata={"length": size, "length_limit": _LENGTH_LIMIT},
            )
        return UncheckedPrompt(lambda: self.prompt(document), size)

    @property
    def _texts(self) -> tuple[str, ...]:
        return (self.text,) if self.turns is None else (self.turns.system, self.turns.user)

    def _values(self, document: str) -> Mapping[str, str]:
        return {**self.known, "document": document}

    def prompt(self, document: str) -> Text | Chat:
        """Return the prompt that asks about one document; raises InvalidRequest for an empty one."""
        _check_document(document)
        values = self._values(document)
        if self.turns is None:
            return Text(_filled(self.text, values))
        turns = [("system", self.turns.system), ("user", self.turns.user)]
        said = tuple(ChatMessage(role, _filled(text, values)) for role, text in turns if text)
        return Chat(Conversation(said, template_arguments=_NO_THINKING))


@dataclasses.dataclass(frozen=True, slots=True)
class PairForm:
    """The request's query, for a model whose head scores pairs."""

    query: str

    def unchecked(self, document: str) -> UncheckedPrompt:
        """Return the pair with one document; its check raises InvalidRequest for an empty document."""

        def check() -> Pair:
            _check_document(document)
            return Pair(self.query, document)

        return UncheckedPrompt(check, len(self.query) + len(document))


def _check_document(document: str) -> None:
    if not document:
        raise InvalidRequest(Reason.PROMPT_EMPTY, "it is empty; leave it out", field="documents")


def pair_form_of(request: messages.RerankRequest) -> PairForm:
    """Return how documents are scored; raises InvalidRequest for fields that only generating models use."""
    given = {field.name: value for field, value in request.ListFields()}
    for name in ("instruction", "turns", "text", "positive_answer", "negative_answer"):
        if name in given:
            value = "set" if name == "turns" else given[name]
            refuse_value(name, value, "absent: this model has a head that scores query and document alone")
    return PairForm(request.query)


def form_of(request: messages.RerankRequest, info: ModelInfo) -> RerankForm:
    """Return the form of the prompts about documents; raises InvalidRequest."""
    kind = request.WhichOneof("form")
    known = {"instruction": request.instruction or DEFAULT_INSTRUCTION, "query": request.query}
    if kind == "text":
        _check_placeholders("text", request.text)
        return RerankForm(None, request.text, known)
    if not info.has_chat_template:
        raise InvalidRequest(
            Reason.CHAT_TEMPLATE_MISSING,
            f"the model {info.model_id!r} has no chat template; set `text` to a prompt of your own",
            field="text",
        )
    turns = request.turns if kind == "turns" else _DEFAULT_TURNS
    if not turns.user:
        refuse_value("turns.user", "", "the user's turn, which every conversation needs")
    _check_placeholders("turns", f"{turns.system}\n{turns.user}")
    return RerankForm(turns, "", known)


def _check_placeholders(field: str, template: str) -> None:
    if len(template) > _FORM_LENGTH_LIMIT:
        refuse_value(field, len(template), f"at most {_FORM_LENGTH_LIMIT} characters", unit="characters")
    missing = {"query", "document"} - set(_PLACEHOLDERS.findall(template))
    if missing:
        wanted = " and ".join(f"{{{name}}}" for name in sorted(missing))
        raise InvalidRequest(
            Reason.PARAMETER_OUT_OF_RANGE,
            # The message does not show the form: it is most of a prompt.
            f"`{field}` must contain {wanted}",
            field=field,
            metadata={"field": field, "wanted": wanted},
        )


def _filled_length(template: str, values: Mapping[str, str]) -> int:
    """Return the length of the filled template, without filling it."""
    lengths = ((f"{{{name}}}", len(value)) for name, value in values.items())
    return len(template) + sum(
        template.count(placeholder) * (length - len(placeholder)) for placeholder, length in lengths
    )


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Fill all placeholders at once, so that no value is taken for a placeholder."""
    return _PLACEHOLDERS.sub(lambda found: values[found[1]], template)
