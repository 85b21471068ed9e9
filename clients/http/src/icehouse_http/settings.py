"""Settings of the HTTP front, with their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the front is told when it starts."""

    address: str = "localhost:50051"
    """The Icehouse server: host:port, or unix:/path."""
    ca_pem: bytes | None = dataclasses.field(default=None, repr=False)
    """The authority of the server's certificate; None speaks without TLS."""
    connect_timeout_s: float = 5.0
    """For a connection to the server, TLS and HTTP/2's first words included."""
    watches_health: bool = True
    """Pass over a server whose health check says that it does not serve. Not for one that wants credentials
    for that check."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of callers, and the model or adapter that each stands for."""
    strict_models: bool = False
    """Refuse a model's name that is neither served nor an alias."""
    temperature: float | None = None
    """For requests that name none; None leaves it to the server, which draws greedily."""
    exact_prompts: bool = False
    """Whether prompts are just what the model's template makes of them, and not stable."""
    allow_origins: tuple[str, ...] = ()
    """Web pages that may call; "*" lets all."""
    names: tuple[str, ...] = ()
    """Host names that it answers to, beside addresses and localhost; "*" is any."""
    max_body_bytes: int = 32 * MIB
    body_memory_bytes: int = 256 * MIB
    """For the bodies of all requests until they are answered."""
    max_structure_bytes: int = MIB
    """Of a body outside of its strings, a string counting as 16: values hold up others, texts do not."""
    max_requests: int = 512
    """At once, of all callers; the server lets 256 calls run on each of the three connections."""
    body_timeout_s: float = 60.0
    """For a request's whole body."""
    question_timeout_s: float = 30.0
    """For what the server answers without computing: who may call, which models there are."""
    ping_interval_s: float = 10.0
    """A stream is never silent for longer."""
    max_stored_responses: int = 256
    """How many responses `previous_response_id` may name; the oldest are forgotten."""
    max_stored_bytes: int = 64 * MIB
    has_access_log: bool = True
