"""Callers that keep a server busy, check every token they get, and count what they have seen."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import grpc
from icehouse.v1 import inference_service_pb2 as pb
from icehouse.v1 import inference_service_pb2_grpc, prompt_pb2

from tests.fixtures.patience import BOUND_S

_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN})
"""What callers of a process that was killed are told by their own side."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """A prompt and what the model says to it, computed without a cache."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]


@dataclasses.dataclass
class Seen:
    """What the callers of one round got."""

    finished_count: int = 0
    cut_codes: Counter[grpc.StatusCode] = dataclasses.field(default_factory=Counter)
    """What callers of calls that were cut off were told."""
    cached_token_count: int = 0
    ssd_token_count: int = 0

    @property
    def cut_count(self) -> int:
        """Calls that were cut off."""
        return self.cut_codes.total()


class EventTrigger:
    """Calls `action` once, when so many events have come over all calls together."""

    def __init__(self, *, event_count: int, action: Callable[[], None]) -> None:
        self._left = event_count
        self._action = action
        self._lock = threading.Lock()

    def count(self) -> None:
        """Note an event."""
        with self._lock:
            self._left -= 1
            is_due = self._left == 0
        if is_due:
            self._action()


def ask(address: str, reference: Reference, seen: Seen, *, on_event: Callable[[], None]) -> bool:
    """Stream one reply and compare each token; False when the server went away meanwhile."""
    tokens: list[int] = []
    request = pb.GenerateRequest(
        prompt={"tokens": prompt_pb2.TokenPrompt(ids=reference.prompt)},
        max_output_tokens=len(reference.reply),
    )
    with grpc.insecure_channel(address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        try:
            for answer in stub.Stream(request, timeout=BOUND_S):
                on_event()
                tokens += answer.delta.token_ids
                assert tuple(tokens) == reference.reply[: len(tokens)], "a wrong token"
                if answer.WhichOneof("event") == "started":
                    seen.cached_token_count += answer.started.cache.cached_tokens
                    seen.ssd_token_count += answer.started.cache.ssd_tokens
        except grpc.RpcError as error:
            assert error.code() in _GONE, error
            seen.cut_codes[error.code()] += 1
            return False
    assert tuple(tokens) == reference.reply, "the reply ended early"
    seen.finished_count += 1
    return True


def run_until_gone(
    address: str, references: Sequence[Reference], *, rng: random.Random, trigger: EventTrigger, callers: int
) -> Seen:
    """Keep `callers` calls open until the server goes away."""
    seen = Seen()

    def call_on(order: random.Random) -> None:
        while ask(address, order.choice(references), seen, on_event=trigger.count):
            pass

    with concurrent.futures.ThreadPoolExecutor(callers) as pool:
        running = [pool.submit(call_on, random.Random(rng.random())) for _ in range(callers)]
        for call in running:
            call.result()
    return seen
