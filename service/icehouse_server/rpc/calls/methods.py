"""Method table: who may call each RPC, what it costs, whose share it counts against, how long it may take.

Only this table decides; the interceptor obeys it, and docs/methods.md shows it. A method without a row is not
served, and a test asks the server's own reflection for such methods. Methods of the worker protocol are
served if it is enabled.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from icehouse_server.rpc.access.shares import FairShare

KIB = 1 << 10
LONG_MESSAGE_BYTES = 256 * KIB
"""A longer request is parsed off the event loop, with fair turns for callers."""


class MethodAccess(enum.StrEnum):
    """Who may call a method."""

    OPEN = "open"
    """Anybody if `security.health_open` is set, otherwise as CALLER."""
    CALLER = "caller"
    """Anybody with credentials, if they are required."""
    OPERATOR = "operator"


class WorkThread(enum.StrEnum):
    """The thread that does the most expensive part of a call."""

    EVENT_LOOP = "event loop"
    TOKENIZER = "tokenizer threads"
    INFERENCE = "inference thread"
    STORAGE = "storage thread"


class CallCost(enum.StrEnum):
    """What a call is charged if tokens per minute are limited."""

    NOTHING = "nothing"
    PROMPT = "prompt"
    """The prompt's tokens."""
    GENERATION = "generation"
    """The prompt's tokens and the output that it may ask for."""


class CallPool(enum.StrEnum):
    """Calls that share one limit."""

    WORK = "work"
    COMMANDS = "commands"
    """Cache commands and counters."""
    WATCHES = "watches"
    """Calls that take almost no time and may never end."""
    HEALTH = "health"


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """One row of the table."""

    pool: CallPool
    thread: WorkThread
    cost: CallCost = CallCost.NOTHING
    access: MethodAccess = MethodAccess.CALLER
    message_byte_limit: int | None = None
    """Longest request; None is `server.max_message_bytes`."""
    message_timeout_s: float | None = None
    """How long the request may take to arrive; None is `connection.message_timeout_s`."""
    own_deadline_s: float | None = None
    """If the usual deadline does not fit."""
    caller_limit: int | None = None
    """Concurrent calls per caller; None for as many as the pool allows. For calls that cost others while they
    last: repeated messages, or many bytes that may stay unread."""

    @property
    def deadline_s(self) -> float | None:
        """How long a call without its own deadline may take; None is forever."""
        if self.own_deadline_s is not None:
            return self.own_deadline_s
        if self.pool in _ENDLESS:
            return None
        return _DEADLINES_S[self.cost]


_ENDLESS = frozenset((CallPool.WATCHES, CallPool.HEALTH))
_DEADLINES_S = {
    CallCost.NOTHING: 60.0,
    CallCost.PROMPT: 600.0,
    # The longest output, at two tokens a second.
    CallCost.GENERATION: 4 * 3600.0,
}
_WHOLE_DISK_S = 24 * 3600.0
"""For reading or removing terabytes."""

_DOWNLOAD_S = 4 * 3600.0
"""For fetching and loading a model."""

_GENERATION = Method(CallPool.WORK, WorkThread.INFERENCE, CallCost.GENERATION)
_COMMAND = Method(CallPool.COMMANDS, WorkThread.INFERENCE, CallCost.PROMPT)
_COUNTERS = Method(CallPool.COMMANDS, WorkThread.INFERENCE, message_byte_limit=4 * KIB)
_WHOLE_DISK = Method(
    CallPool.COMMANDS,
    WorkThread.STORAGE,
    access=MethodAccess.OPERATOR,
    message_byte_limit=4 * KIB,
    own_deadline_s=_WHOLE_DISK_S,
)
_ARCHIVE_PART_BYTES = 1024 * KIB + 4 * KIB
"""1 MiB of an archive, and the message's overhead."""
_TRANSFER = Method(CallPool.COMMANDS, WorkThread.STORAGE, own_deadline_s=_WHOLE_DISK_S, caller_limit=2)
_LOOKUP = Method(CallPool.WORK, WorkThread.EVENT_LOOP, message_byte_limit=64 * KIB)
_LISTING = Method(CallPool.COMMANDS, WorkThread.EVENT_LOOP, message_byte_limit=4 * KIB)
_CHANNELZ = Method(
    CallPool.WATCHES,
    WorkThread.EVENT_LOOP,
    access=MethodAccess.OPERATOR,
    message_byte_limit=KIB,
    message_timeout_s=2.0,
    own_deadline_s=60.0,
)
_WORKER_COMMAND = Method(
    CallPool.COMMANDS,
    WorkThread.INFERENCE,
    access=MethodAccess.OPERATOR,
    message_byte_limit=4 * KIB,
    message_timeout_s=10.0,
    own_deadline_s=600.0,
)
_MODEL_COMMAND = Method(
    CallPool.COMMANDS,
    WorkThread.INFERENCE,
    access=MethodAccess.OPERATOR,
    message_byte_limit=4 * KIB,
    own_deadline_s=_DOWNLOAD_S,
)
_REFLECTION = Method(
    CallPool.WATCHES, WorkThread.EVENT_LOOP, message_byte_limit=64 * KIB, own_deadline_s=600.0, caller_limit=8
)
_HEALTH = Method(
    CallPool.HEALTH,
    WorkThread.EVENT_LOOP,
    access=MethodAccess.OPEN,
    message_byte_limit=KIB,
    message_timeout_s=2.0,
)

METHODS: Mapping[str, Method] = {
    "icehouse.v1.InferenceService/Generate": _GENERATION,
    "icehouse.v1.InferenceService/Stream": _GENERATION,
    "icehouse.v1.InferenceService/Tokenize": Method(CallPool.WORK, WorkThread.TOKENIZER, CallCost.PROMPT),
    "icehouse.v1.InferenceService/Detokenize": Method(CallPool.WORK, WorkThread.TOKENIZER, CallCost.PROMPT),
    # Covers all tenants.
    "icehouse.v1.InferenceService/CacheStats": dataclasses.replace(_COUNTERS, access=MethodAccess.OPERATOR),
    "icehouse.v1.CacheService/Explain": _COMMAND,
    "icehouse.v1.CacheService/Warm": _GENERATION,
    "icehouse.v1.CacheService/Pin": _COMMAND,
    "icehouse.v1.CacheService/Unpin": _COMMAND,
    "icehouse.v1.CacheService/EndSession": _COUNTERS,
    "icehouse.v1.CacheService/Evict": _COMMAND,
    "icehouse.v1.CacheService/EvictAll": dataclasses.replace(_WHOLE_DISK, thread=WorkThread.INFERENCE),
    "icehouse.v1.CacheService/Verify": _WHOLE_DISK,
    "icehouse.v1.CacheService/Export": dataclasses.replace(_TRANSFER, cost=CallCost.PROMPT),
    "icehouse.v1.CacheService/Import": dataclasses.replace(_TRANSFER, message_byte_limit=_ARCHIVE_PART_BYTES),
    "icehouse.v1.ModelService/ListModels": _LOOKUP,
    "icehouse.v1.ModelService/GetModel": _LOOKUP,
    "icehouse.v1.ModelService/LoadModel": _MODEL_COMMAND,
    "icehouse.v1.ModelService/UnloadModel": _MODEL_COMMAND,
    "icehouse.v1.ServerService/GetServer": _LOOKUP,
    "icehouse.v1.ServerService/GetStats": _COUNTERS,
    "icehouse.v1.ServerService/WatchStats": dataclasses.replace(
        _COUNTERS, pool=CallPool.WATCHES, caller_limit=8
    ),
    "icehouse.v1.ServerService/ListRequests": _LISTING,
    "icehouse.v1.ServerService/CancelRequest": _LISTING,
    "icehouse.v1.EmbeddingService/Embed": _GENERATION,
    "icehouse.v1.RerankService/Rerank": _GENERATION,
    "vllm.grpc.engine.VllmEngine/Generate": _GENERATION,
    "vllm.grpc.engine.VllmEngine/Embed": _GENERATION,
    "vllm.grpc.engine.VllmEngine/HealthCheck": dataclasses.replace(_HEALTH, own_deadline_s=60.0),
    "vllm.grpc.engine.VllmEngine/FlushCache": _WORKER_COMMAND,
    "vllm.grpc.engine.VllmEngine/StartProfile": _WORKER_COMMAND,
    "vllm.grpc.engine.VllmEngine/StopProfile": _WORKER_COMMAND,
    "vllm.grpc.engine.VllmEngine/Abort": Method(
        CallPool.COMMANDS, WorkThread.EVENT_LOOP, message_byte_limit=64 * KIB, message_timeout_s=10.0
    ),
    "vllm.grpc.engine.VllmEngine/GetModelInfo": _LOOKUP,
    "vllm.grpc.engine.VllmEngine/GetServerInfo": _LOOKUP,
    # Shows how busy all tenants keep the server.
    "vllm.grpc.engine.VllmEngine/GetLoads": Method(
        CallPool.COMMANDS,
        WorkThread.EVENT_LOOP,
        access=MethodAccess.OPERATOR,
        message_byte_limit=4 * KIB,
        message_timeout_s=10.0,
    ),
    "vllm.grpc.engine.VllmEngine/GetTokenizer": Method(
        CallPool.WORK,
        WorkThread.TOKENIZER,
        message_byte_limit=4 * KIB,
        message_timeout_s=10.0,
        own_deadline_s=600.0,
        caller_limit=4,
    ),
    # A gateway has one such call, and may be several processes.
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": Method(
        CallPool.WATCHES,
        WorkThread.EVENT_LOOP,
        message_byte_limit=4 * KIB,
        message_timeout_s=10.0,
        caller_limit=16,
    ),
    "grpc.health.v1.Health/Check": dataclasses.replace(_HEALTH, own_deadline_s=60.0),
    "grpc.health.v1.Health/List": dataclasses.replace(_HEALTH, own_deadline_s=60.0),
    "grpc.health.v1.Health/Watch": _HEALTH,
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _REFLECTION,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _REFLECTION,
    "grpc.channelz.v1.Channelz/GetTopChannels": _CHANNELZ,
    "grpc.channelz.v1.Channelz/GetServers": _CHANNELZ,
    "grpc.channelz.v1.Channelz/GetServer": _CHANNELZ,
    "grpc.channelz.v1.Channelz/GetServerSockets": _CHANNELZ,
    "grpc.channelz.v1.Channelz/GetChannel": _CHANNELZ,
    "grpc.channelz.v1.Channelz/GetSubchannel": _CHANNELZ,
    "grpc.channelz.v1.Channelz/GetSocket": _CHANNELZ,
}

_COMMAND_LIMIT = 256
_WATCH_LIMIT = 512
_ANY_NUMBER = 1 << 62
_HEALTH_CALLS_PER_CONNECTION = 8
"""A client that watches health does so once per connection."""


def shares_of(*, concurrent_call_limit: int, connection_limit: int) -> Mapping[CallPool, FairShare]:
    """Return the slots of each pool.

    One caller may have three quarters of the calls, half of the commands, a fifth of the watches. Health
    checkers have no credentials, and one of them may use all possible connections, so each connection has its
    own health slots.
    """
    health_limit = connection_limit * _HEALTH_CALLS_PER_CONNECTION
    return {
        CallPool.WORK: FairShare(limit=concurrent_call_limit, factor=3.0, what="calls"),
        CallPool.COMMANDS: FairShare(limit=_COMMAND_LIMIT, factor=1.0, what="cache commands and counters"),
        CallPool.WATCHES: FairShare(limit=_WATCH_LIMIT, factor=0.25, what="watches"),
        CallPool.HEALTH: FairShare(
            limit=health_limit, factor=health_limit, most=_HEALTH_CALLS_PER_CONNECTION, what="health checks"
        ),
    }


def caller_shares() -> Mapping[str, FairShare]:
    """Return, by method, the slots per caller, for methods that limit them."""
    return {
        name: FairShare(
            limit=_ANY_NUMBER,
            factor=_ANY_NUMBER,
            most=row.caller_limit,
            what=f"{name.partition('/')[2]} calls",
        )
        for name, row in METHODS.items()
        if row.caller_limit is not None
    }
