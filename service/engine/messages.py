"""What may come through the engine's mailbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from service.domain.cache_orders import CacheAnswer, CacheOrder
from service.domain.cache_stats import CacheStats
from service.domain.ids import RequestId
from service.domain.request import GenerationRequest
from service.domain.stats import EngineStats
from service.errors import IcehouseError
from service.kv.messages import Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Submit:
    """New work: a request, and others for the same prompt that are taken in with it or not at all."""

    request: GenerationRequest
    siblings: tuple[GenerationRequest, ...] = ()

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        return (self.request, *self.siblings)


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more; `error` is what its caller is told."""

    request_id: RequestId
    error: IcehouseError


@dataclasses.dataclass(frozen=True, slots=True)
class QueryStats:
    """Call `reply` on the inference thread with a snapshot; it must not block."""

    reply: Callable[[EngineStats, CacheStats | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Carry out an order to the prefix cache and call `reply` once; it must not block."""

    order: CacheOrder
    reply: Callable[[CacheAnswer | IcehouseError], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new work, finish what runs until `deadline_time` (`Clock.monotonic`), then stop."""

    deadline_time: float


Message = Submit | Cancel | QueryStats | Order | Drain | Outcome
