"""Watched app: what is counted, bounded, logged and named of every request, around the app itself."""

from __future__ import annotations

import asyncio
import dataclasses

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from icehouse_http.errors import dialect_of
from icehouse_http.serving.access_log import AccessLog
from icehouse_http.serving.body_budget import BodyBudget
from icehouse_http.serving.metrics import Metrics
from icehouse_http.serving.request_ids import OWN_ID, REQUEST_ID, headers_of, new_id, own_id

QUIET_PATHS = ("/health", "/metrics")
"""Asked for every few seconds by whoever watches the front, so they have no line in the log."""
PATHS = (
    *QUIET_PATHS,
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
_ONE_MODEL = "/v1/models/{model}"
_OTHER = "other"
_SHOWN_LIMIT = 100


@dataclasses.dataclass(slots=True)
class _Seen:
    """What is known of a request so far."""

    start_time: float
    status: int = 499
    """The caller left before there was one."""
    first_byte_s: float | None = None
    body_bytes: int = 0
    held_bytes: int = 0
    """Of the body, until the answer or the refusal of it."""
    sent_bytes: int = 0


class Watched:
    """The app, as the server calls it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, budget: BodyBudget, log: AccessLog | None) -> None:
        self._app = app
        self._metrics = metrics
        self._budget = budget
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the app's start and stop."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        seen, path = _Seen(clock()), path_label(scope["path"])
        headers = Headers(scope=scope)
        scope[OWN_ID] = own_id(headers)
        scope[REQUEST_ID] = scope[OWN_ID] or new_id("req_")

        def give_back() -> None:
            self._budget.give_back(seen.held_bytes)
            seen.held_bytes = 0

        async def counted_receive() -> Message:
            message = await receive()
            if size_bytes := len(message.get("body", b"")):
                self._budget.take(size_bytes)
                seen.body_bytes += size_bytes
                seen.held_bytes += size_bytes
            return message

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                told = headers_of(scope[REQUEST_ID], dialect_of(scope["path"], headers))
                message = {**message, "headers": [*message.get("headers", ()), *told]}
                if seen.status >= 400:
                    # A refusal may be kept back, and its body is not.
                    give_back()
            elif size_bytes := len(message.get("body", b"")):
                if seen.first_byte_s is None:
                    seen.first_byte_s = clock() - seen.start_time
                seen.sent_bytes += size_bytes
            await send(message)

        self._metrics.in_flight_count += 1
        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            self._metrics.in_flight_count -= 1
            give_back()
            self._ended(scope, path, seen, duration_s=clock() - seen.start_time)

    def _ended(self, scope: Scope, path: str, seen: _Seen, *, duration_s: float) -> None:
        protocol = "none" if path in (*QUIET_PATHS, _OTHER) else dialect_of(path).value
        self._metrics.request_ended(path=path, protocol=protocol, status=seen.status)
        if seen.first_byte_s is not None and seen.status == 200:
            self._metrics.first_byte(path=path, duration_s=seen.first_byte_s)
        if self._log is None or path in QUIET_PATHS:
            return
        shown = scope["raw_path"].decode("ascii", "replace")[:_SHOWN_LIMIT] if path == _OTHER else path
        facts: dict[str, object] = {
            "method": scope["method"][:_SHOWN_LIMIT],
            "path": shown,
            "status": seen.status,
            "duration_s": round(duration_s, 6),
            "body_bytes": seen.body_bytes,
            "sent_bytes": seen.sent_bytes,
            "request_id": scope[REQUEST_ID],
        }
        if seen.first_byte_s is not None:
            facts["first_byte_s"] = round(seen.first_byte_s, 6)
        self._log.write(facts, is_refusal=seen.status >= 400)


def path_label(path: str) -> str:
    """Return the path as metrics have it: one of few."""
    if path in PATHS:
        return path
    return _ONE_MODEL if path.startswith("/v1/models/") else _OTHER
