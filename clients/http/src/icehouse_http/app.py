"""App: the paths, what is done with every request, and how errors leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from icehouse.v1.cache_service_pb2 import WarmResult
from icehouse_client import IcehouseClientError, Reply
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from icehouse_http.bounds.connection import KEPT_BACK_S
from icehouse_http.bounds.json_size import JsonSize
from icehouse_http.bounds.own_names import OwnNames
from icehouse_http.bounds.pace import Pace
from icehouse_http.bounds.places import Places
from icehouse_http.bounds.reading_rate import SMALL_BYTES, ReadingRate
from icehouse_http.chat import request as chat_request
from icehouse_http.chat.answer import ChatAnswer
from icehouse_http.errors import ApiError, api_error, bad_request, dialect_of, refusing_by
from icehouse_http.exchange import Answer, Asked, Wishes, respond, until_gone
from icehouse_http.fields import Fields, fields_of
from icehouse_http.messages import request as message_request
from icehouse_http.messages.answer import MessageAnswer
from icehouse_http.messages.pins import Pins
from icehouse_http.messages.token_count import token_count
from icehouse_http.model_list import model_list, one_model
from icehouse_http.responses import request as response_request
from icehouse_http.responses.answer import ResponseAnswer
from icehouse_http.responses.items import Item
from icehouse_http.responses.store import ResponseStore
from icehouse_http.serving.access_log import AccessLog
from icehouse_http.serving.body_budget import BodyBudget
from icehouse_http.serving.logs import LOGGER_NAME
from icehouse_http.serving.metrics import CONTENT_TYPE, Metrics
from icehouse_http.serving.request_ids import (
    ANTHROPIC_HEADER,
    HEADER,
    OWN_ID,
    REQUEST_ID,
    named,
    new_id,
)
from icehouse_http.serving.watched import Watched, path_label
from icehouse_http.settings import Settings
from icehouse_http.texts import completions
from icehouse_http.texts.embeddings import embeddings
from icehouse_http.texts.reranking import ranking
from icehouse_http.upstream import Caller, Target, Upstream

_log = logging.getLogger(LOGGER_NAME)

Endpoint = Callable[[Request, Caller], Awaitable[Response]]

_PACED = frozenset({401, 408, 413, 429})
"""Refusals for what a caller does, as opposed to what it asks. Who has many is told of them later and later:
each takes the event loop half a millisecond, and who waits for an answer does not ask again meanwhile."""
_WISHES: Wishes = {("UNSUPPORTED", "max_reasoning_tokens"): "max_reasoning_tokens"}
_CODEX_WISHES: Wishes = {**_WISHES, ("TOOLS_UNSUPPORTED", "tool_choice"): "parallel_tool_calls"}
"""Codex asks every model for one call at a time. Where calls are no JSON nothing can hold a model to that."""


def create_app(settings: Settings) -> Starlette:
    """Return the app; it connects to the server when it is started."""
    front = Front(settings)
    routes = [
        Route("/health", front.guarded(front.health), methods=["GET"]),
        Route("/metrics", front.guarded(front.metrics_page), methods=["GET"]),
        Route("/v1/models", front.guarded(front.models), methods=["GET"]),
        Route("/v1/models/{model:path}", front.guarded(front.model), methods=["GET"]),
        Route("/v1/chat/completions", front.guarded(front.chat), methods=["POST"]),
        Route("/v1/completions", front.guarded(front.completions), methods=["POST"]),
        Route("/v1/embeddings", front.guarded(front.embeddings), methods=["POST"]),
        Route("/v1/rerank", front.guarded(front.rerank), methods=["POST"]),
        Route("/v2/rerank", front.guarded(front.rerank), methods=["POST"]),
        Route("/v1/responses", front.guarded(front.responses), methods=["POST"]),
        Route("/v1/messages", front.guarded(front.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", front.guarded(front.count_tokens), methods=["POST"]),
    ]
    watched = Middleware(
        Watched,
        metrics=front.metrics,
        budget=front.budget,
        log=AccessLog() if settings.has_access_log else None,
    )
    pages = Middleware(
        _Pages,
        allow_origins=settings.allow_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["retry-after", "retry-after-ms", HEADER, ANTHROPIC_HEADER],
    )
    return Starlette(
        routes=routes,
        middleware=[watched, pages] if settings.allow_origins else [watched],
        exception_handlers={HTTPException: _no_such_path},
        lifespan=front.lifespan,
    )


class _Pages(CORSMiddleware):
    """What browsers are told about pages of other sites."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer without a body, which no browser shows: 204 lets the request come, 403 does not."""
        told = super().preflight_response(request_headers)
        headers = {name: text for name, text in told.headers.items() if not name.startswith("content-")}
        return Response(status_code=403 if told.status_code >= 400 else 204, headers=headers)


class Front:
    """The endpoints. They belong to the event loop that `lifespan` runs in."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._upstream: Upstream | None = None
        self.metrics = Metrics()
        self.budget = BodyBudget(limit_bytes=settings.body_memory_bytes)
        self._store = ResponseStore(
            max_entries=settings.max_stored_responses, max_bytes=settings.max_stored_bytes
        )
        self._pins = Pins()
        self._places = Places(limit=settings.max_requests)
        self._reading = ReadingRate()
        self._names = OwnNames(settings.names)
        self._refusals = Pace(per_s=20.0, at_once=64.0, longest_s=5.0)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Hold the connections to the server while the app runs."""
        self._upstream = Upstream(self._settings)
        try:
            yield
        finally:
            await self._pins.close()
            await self._upstream.close()

    @property
    def upstream(self) -> Upstream:
        """The connections to the server."""
        assert self._upstream is not None, "the app was not started"
        return self._upstream

    def guarded(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint with what holds for each: who may call, and errors in the protocol's shape."""

        async def guard(request: Request) -> Response:
            machine = _machine_of(request)
            refused = machine
            try:
                if request.url.scheme == "http":
                    self._names.check(request.headers.get("host"))
                self._check_origin(request)
                _check_length(request)
                caller = self.upstream.caller(request.headers, machine)
                if endpoint in (self.health, self.metrics_page):
                    return await endpoint(request, caller)
                await self.upstream.admit(caller)
                refused = caller.name
                return await self._places.response(caller.name, lambda: endpoint(request, caller))
            except IcehouseClientError as error:
                refusal = api_error(error)
            except ApiError as error:
                # With the frames that it came by, it would hold the body.
                refusal = error.with_traceback(None)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:
                facts = {"path": path_label(request.url.path), "request_id": request.scope[REQUEST_ID]}
                _log.exception("http_request_failed", extra=facts)
                refusal = ApiError(500, "the HTTP front failed; see its log", code="INTERNAL")
            if refusal.status in _PACED:
                now = asyncio.get_running_loop().time()
                request.scope[KEPT_BACK_S] = self._refusals.delay_s(refused, now)
            return _told(request, refusal, refusal.headers)

        return guard

    def _check_origin(self, request: Request) -> None:
        """Refuse what a web page of another site sends: whoever visits it did not mean to call."""
        origin = request.headers.get("origin")
        allowed = self._settings.allow_origins
        if origin and "*" not in allowed and origin not in allowed:
            message = f"pages of {origin} may not call; --allow-origin {origin} allows them"
            raise ApiError(403, message, code="origin_not_allowed")

    async def _fields(self, request: Request, caller: Caller) -> Fields:
        """Return the body's fields; raises ApiError for a body that is too large, too slow or no JSON."""
        told = request.headers.get("content-length", "")
        size = JsonSize(limit=self._settings.max_structure_bytes)
        if told.isdecimal() and int(told) <= SMALL_BYTES:
            return fields_of(await self._body(request, size))
        async with self._reading.turn(caller.name):
            try:
                return fields_of(await self._body(request, size))
            finally:
                self._reading.charge(caller.name, size.work)

    async def _body(self, request: Request, size: JsonSize) -> bytes:
        limit = self._settings.max_body_bytes
        too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_large
                    size.add(piece)
        except TimeoutError:
            message = f"the body did not arrive in {self._settings.body_timeout_s:.0f} s"
            raise ApiError(408, message, code="body_late") from None
        return bytes(body)

    async def _target(self, fields: Fields, caller: Caller) -> Target:
        return await self.upstream.target(caller, fields.text("model"))

    async def _respond(
        self, request: Request, caller: Caller, asked: Asked, answer: Answer, *, wishes: Wishes = _WISHES
    ) -> Response:
        interval_s = self._settings.ping_interval_s
        return await respond(request, caller.client, asked, answer, wishes=wishes, ping_interval_s=interval_s)

    async def health(self, request: Request, caller: Caller) -> Response:
        """GET /health: 200 while the server takes requests, 503 otherwise."""
        try:
            status = await self.upstream.health(caller)
        except IcehouseClientError as error:
            status = error.reason
        return JSONResponse({"status": status}, 200 if status == "SERVING" else 503)

    async def metrics_page(self, request: Request, caller: Caller) -> Response:
        """GET /metrics, of the front itself."""
        page = self.metrics.text(held_bytes=self.budget.held_bytes, limit_bytes=self.budget.limit_bytes)
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    async def models(self, request: Request, caller: Caller) -> Response:
        """GET /v1/models."""
        return JSONResponse(model_list(await self.upstream.models(caller), self._settings.aliases))

    async def model(self, request: Request, caller: Caller) -> Response:
        """GET /v1/models/{id}."""
        models = await self.upstream.models(caller)
        found = one_model(models, self._settings.aliases, request.path_params["model"])
        return JSONResponse(found)

    async def chat(self, request: Request, caller: Caller) -> Response:
        """POST /v1/chat/completions."""
        fields = await self._fields(request, caller)
        target = await self._target(fields, caller)
        asked = chat_request.asked_of(fields, target, request.headers, self._settings)
        name = _named("chatcmpl-", asked, request)
        answer = ChatAnswer(name, asked.options, tells_usage=_tells_usage(fields))
        return await self._respond(request, caller, asked, answer)

    async def responses(self, request: Request, caller: Caller) -> Response:
        """POST /v1/responses."""
        fields = await self._fields(request, caller)
        target = await self._target(fields, caller)
        wanted = response_request.asked_of(
            fields, target, request.headers, self._settings, store=self._store, scope=caller.scope
        )
        asked, name = wanted.asked, _named("resp_", wanted.asked, request)

        def keep(reply: Reply, items: Sequence[Item]) -> None:
            if wanted.is_stored:
                self._store.put(caller.scope, name, [*wanted.messages, reply.message()], items)

        seals = wanted.seals_reasoning
        answer = ResponseAnswer(name, wanted.told, wanted.functions, seals=seals, keep=keep)
        return await self._respond(request, caller, asked, answer, wishes=_CODEX_WISHES)

    async def messages(self, request: Request, caller: Caller) -> Response:
        """POST /v1/messages."""
        fields = await self._fields(request, caller)
        target = await self._target(fields, caller)
        fields.require("max_tokens")
        asked = message_request.asked_of(fields, target, request.headers, self._settings)
        name = _named("msg_", asked, request)
        answer = MessageAnswer(name, lambda: self._pins.ask(caller.client, fields, asked))
        if fields.raw("max_tokens") == 0:
            return await self._warm(request, caller, asked, answer)
        return await self._respond(request, caller, asked, answer)

    async def _warm(self, request: Request, caller: Caller, asked: Asked, answer: MessageAnswer) -> Response:
        """Bring a prompt into the cache, as Anthropic's API does for a message of no tokens."""
        if asked.is_streamed:
            raise bad_request("stream must be false if max_tokens is 0", param="stream")
        prompt: Any = asked.prompt
        options = message_request.prompt_options(asked, prompt)

        async def warm(name: str) -> WarmResult:
            return await caller.client.cache.warm(prompt, request_id=name, **options)

        with refusing_by(asked.names):
            result = await until_gone(request.receive, named(request.scope[REQUEST_ID], warm))
        return JSONResponse(answer.warmed(options["model"], result))

    async def count_tokens(self, request: Request, caller: Caller) -> Response:
        """POST /v1/messages/count_tokens: the tokens that the prompt of such a request would have."""
        fields = await self._fields(request, caller)
        target = await self._target(fields, caller)
        asked = message_request.asked_of(fields, target, request.headers, self._settings)
        count = await until_gone(request.receive, token_count(caller.client, asked))
        return JSONResponse({"input_tokens": count})

    async def completions(self, request: Request, caller: Caller) -> Response:
        """POST /v1/completions."""
        fields = await self._fields(request, caller)
        target = await self._target(fields, caller)
        asked = completions.asked_of(fields, target, request.headers, self._settings)
        echo = await completions.echo_of(caller.client, fields, asked)
        name, tells_usage = _named("cmpl-", asked, request), _tells_usage(fields)
        answer = completions.TextAnswer(name, asked.options, echo, tells_usage)
        return await self._respond(request, caller, asked, answer)

    async def embeddings(self, request: Request, caller: Caller) -> Response:
        """POST /v1/embeddings."""
        fields = await self._fields(request, caller)
        target = await self._target(fields, caller)
        name = request.scope[REQUEST_ID]
        work = embeddings(caller.client, fields, target, request_id=name)
        return JSONResponse(await until_gone(request.receive, work))

    async def rerank(self, request: Request, caller: Caller) -> Response:
        """POST /v1/rerank."""
        fields = await self._fields(request, caller)
        target = await self._target(fields, caller)
        name = _id_of("rerank-", request)
        work = ranking(caller.client, fields, target, name=name, request_id=request.scope[REQUEST_ID])
        return JSONResponse(await until_gone(request.receive, work))


def _machine_of(request: Request) -> str:
    return request.client.host if request.client else ""


def _check_length(request: Request) -> None:
    """Refuse a body with two lengths: a proxy might take the other one, and what follows for a request."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        message = "a request has either a content-length or a transfer-encoding"
        raise ApiError(400, message, code="two_lengths")


def _tells_usage(fields: Fields) -> bool:
    return (fields.object("stream_options") or Fields({})).flag("include_usage")


def _id_of(kind: str, request: Request) -> str:
    """Return the answer's id, which is the request's too unless the caller has named that."""
    name = new_id(kind)
    request.scope[REQUEST_ID] = request.scope[OWN_ID] or name
    return name


def _named(kind: str, asked: Asked, request: Request) -> str:
    """Name the request at the server; return the answer's id."""
    name = _id_of(kind, request)
    asked.options["request_id"] = request.scope[REQUEST_ID]
    return name


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    # Starlette adds HEAD to GET.
    known = ((r.path_format, method) for r in routes for method in (r.methods or set()) - {"HEAD"})
    served = ", ".join(f"{method} {path}" for path, method in known)
    message = f"{request.method} {request.url.path}: {error.detail}; what is served: {served}"
    refusal = ApiError(error.status_code, message, code="no_such_path")
    return _told(request, refusal, error.headers)


def _told(request: Request, refusal: ApiError, headers: Mapping[str, str] | None) -> Response:
    body = refusal.body(dialect_of(request.url.path, request.headers))
    return JSONResponse(body, refusal.status, headers)
