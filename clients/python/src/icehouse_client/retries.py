"""Retries of calls that the server refused for now and said when to send again."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from icehouse_client.errors import IcehouseClientError, translated

Answer = TypeVar("Answer")

_SPREAD = 0.25
"""A delay is made longer by up to this share, so that those who were refused together come one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a refused call is sent again: RESOURCE_EXHAUSTED with a RetryInfo, of which nothing has run.

    Never past the call's deadline, which counts from the first attempt.
    """

    retry_limit: int = 0

    def __post_init__(self) -> None:
        if self.retry_limit < 0:
            raise ValueError(f"retry_limit is {self.retry_limit}, and must be at least 0")

    def run(self, attempt: Callable[[float | None], Answer], timeout_s: float | None) -> Answer:
        """Return what `attempt` returns, which is called with the time that is left, in seconds."""
        attempts = _Attempts(self.retry_limit, timeout_s)
        while True:
            try:
                with translated():
                    return attempt(attempts.left_s())
            except IcehouseClientError as error:
                time.sleep(attempts.delay_s(error))

    async def run_async(
        self, attempt: Callable[[float | None], Awaitable[Answer]], timeout_s: float | None
    ) -> Answer:
        """As `run`, with an awaitable attempt."""
        attempts = _Attempts(self.retry_limit, timeout_s)
        while True:
            try:
                with translated():
                    return await attempt(attempts.left_s())
            except IcehouseClientError as error:
                await asyncio.sleep(attempts.delay_s(error))


class _Attempts:
    """What is left of one call's retries and of its time."""

    def __init__(self, retry_limit: int, timeout_s: float | None) -> None:
        self._left_count = retry_limit
        self._end_time = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        return None if self._end_time is None else max(0.0, self._end_time - time.monotonic())

    def delay_s(self, error: IcehouseClientError) -> float:
        """Return how long to wait; raises the error where trying again makes no sense."""
        told_s, left_s = error.retry_after_s, self.left_s()
        if self._left_count == 0 or error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or told_s is None:
            raise error
        delay_s = told_s * random.uniform(1.0, 1.0 + _SPREAD)
        if left_s is not None and delay_s >= left_s:
            raise error
        self._left_count -= 1
        return delay_s
