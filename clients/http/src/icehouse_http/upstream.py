"""Upstream: the connections to the Icehouse server, and what is known of its model.

Belongs to the event loop it was opened on.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import itertools
import re
import time
from collections.abc import Mapping

from icehouse.v1.model_service_pb2 import Model
from icehouse_client import AsyncClient, Security

from icehouse_http.bounds.admission import Admission
from icehouse_http.errors import ApiError
from icehouse_http.settings import Settings

_AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")
"""Of Claude Code's subagents, and of Codex's threads."""
_PARENT_HEADERS = ("parent-session-id", "x-parent-session-id")
"""The second is OpenCode's, of subagents."""
NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What the server takes as the name of a session or an agent."""
_KNOWN_FOR_S = 10.0
"""How long the answer of ListModels is taken as true."""
_KNOWN_CALLERS = 256
"""Of so many callers it is kept: each may see other models."""
_CONNECTION_COUNT = 3
"""A server takes 256 calls at once on each by default, and the front has 512 callers at most."""
_CHANNEL_OPTIONS = (
    # Channels to one address would share a connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC would wait for up to two minutes before it tries again to reach a server that was away.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A machine that has gone says nothing. Its calls end with a ping that it leaves unanswered; a server
    # answers pings however long it computes, and by default takes one every 8 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Who answers a request: the served model, perhaps with an adapter."""

    model: Model
    adapter: str = ""

    @property
    def ends_reasoning(self) -> bool:
        """Whether reasoning can be limited: the model marks where it ends. One that was never loaded may."""
        return not self.model.architecture or bool(self.model.reply_format.reasoning_end)


class Caller:
    """One HTTP caller's view of a connection: its calls carry the caller's token."""

    def __init__(self, connection: AsyncClient, metadata: Mapping[str, str], token: str, host: str) -> None:
        self._connection = connection
        self._metadata = metadata
        self.scope = hashlib.sha256(token.encode()).hexdigest()
        """Tells callers apart who have different tokens, without the token itself."""
        self.name = self.scope if token else f"host {host}"
        """Whose share of the front this request counts against: where nobody proves anything, a machine's."""

    @functools.cached_property
    def client(self) -> AsyncClient:
        """Makes its calls. Made when it is needed: to those who are refused it would be most of the work."""
        return self._connection.with_metadata(self._metadata) if self._metadata else self._connection


class Upstream:
    """The connections, which requests take in turn. `close` ends them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        security = Security(ca_pem=settings.ca_pem)
        # What gRPC calls the least time between two tries is also the most that one may take.
        connect_timeout = ("grpc.min_reconnect_backoff_ms", round(1000 * settings.connect_timeout_s))
        self._clients = [
            AsyncClient(
                settings.address,
                timeout_s=None,
                security=security,
                watches_health=settings.watches_health,
                channel_options=(*_CHANNEL_OPTIONS, connect_timeout),
            )
            for _ in range(_CONNECTION_COUNT)
        ]
        self._turns = itertools.cycle(self._clients)
        self._admission = Admission()
        self._checking: tuple[str, asyncio.Future[str]] | None = None
        self._known: collections.OrderedDict[str, tuple[float, list[Model]]] = collections.OrderedDict()

    async def close(self) -> None:
        """End the connections and what runs on them."""
        for client in self._clients:
            await client.close()

    def caller(self, headers: Mapping[str, str], host: str) -> Caller:
        """Return the view of whoever sent these headers; raises ApiError for a token that cannot be sent."""
        token, metadata = _token_of(headers), _names_of(headers)
        if not (token.isascii() and token.isprintable()):
            raise ApiError(
                401, "the token has characters that a header cannot carry", code="CREDENTIALS_INVALID"
            )
        if token:
            metadata["authorization"] = f"Bearer {token}"
        for client in self._clients:
            # All together, so that a server that does not answer is waited for once.
            client.connect()
        return Caller(next(self._turns), metadata, token, host)

    async def admit(self, caller: Caller) -> None:
        """Let a caller in whom the server knows; raises what it refuses others with."""
        await self._admission.admit(caller.name, lambda: self.models(caller))

    async def health(self, caller: Caller) -> str:
        """Return what the server says of itself: SERVING, NOT_SERVING. Who asks meanwhile hears the same."""
        scope, asking = self._checking or ("", None)
        if asking is None or asking.done() or scope != caller.scope:
            asking = asyncio.ensure_future(caller.client.health(timeout_s=_KNOWN_FOR_S))
            self._checking = caller.scope, asking
        return await asyncio.shield(asking)

    async def models(self, caller: Caller) -> list[Model]:
        """Ask for the models that a caller may use."""
        models = await caller.client.models(timeout_s=self._settings.question_timeout_s)
        self._known[caller.scope] = time.monotonic(), models
        self._known.move_to_end(caller.scope)
        if len(self._known) > _KNOWN_CALLERS:
            self._known.popitem(last=False)
        return models

    async def target(self, caller: Caller, name: str) -> Target:
        """Return who answers to a model's name; raises ApiError for an unknown one where names are strict."""
        asked_time, models = self._known.get(caller.scope, (-_KNOWN_FOR_S, []))
        if time.monotonic() - asked_time > _KNOWN_FOR_S:
            models = await self.models(caller)
        wanted = self._settings.aliases.get(name, name)
        for model in models:
            if wanted == model.id or wanted in model.aliases:
                return Target(model)
            if any(wanted == adapter.name for adapter in model.adapters):
                return Target(model, wanted)
        if not models:
            raise ApiError(503, "the server serves no model yet", code="LOADING", retry_s=1.0)
        if self._settings.strict_models:
            served = ", ".join(model.id for model in models)
            message = f"the model {name!r} is not served; {served} is"
            raise ApiError(404, message, code="model_not_found", param="model")
        return Target(models[0])


def _names_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that names which of a session's agents calls, and the session's parent."""
    keys = {"agent-id": _AGENT_HEADERS, "parent-session-id": _PARENT_HEADERS}
    named = {key: [headers.get(header, "") for header in of] for key, of in keys.items()}
    found = {key: next(filter(NAME.fullmatch, names), "") for key, names in named.items()}
    return {key: name for key, name in found.items() if name}


def _token_of(headers: Mapping[str, str]) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()
