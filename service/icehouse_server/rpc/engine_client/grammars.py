"""Grammar compilers: response formats to grammars, off the event loop, with fair turns and limits.

The compiler is recursive and cannot be interrupted. So its threads get a stack for the largest format, and a
caller stops waiting for a format that takes too long. A caller has one format compiled at a time; two threads
keep callers from blocking each other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

from icehouse_server.domain.response_format import Grammar, ResponseFormat, size_bytes
from icehouse_server.errors import IcehouseError, InvalidRequest, Overloaded, Reason
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.shares import FairQueue, FairShare, ended
from icehouse_server.rpc.engine_client.engine_ports import GrammarPort

THREAD_COUNT = 2
WAITING_LIMIT = 256
"""Formats that may wait for the compiler; most take milliseconds."""

_FIELD = "response_format"
_RETRY_S = 1.0


class GrammarCompilers:
    """Runs a compiler in its own threads. Owned by the event loop; `close` ends them."""

    def __init__(self, compiler: GrammarPort | None, *, byte_limit: int, timeout_s: float) -> None:
        self._compiler = compiler
        self._byte_limit = byte_limit
        self._timeout_s = timeout_s
        self._waiting = FairShare(limit=WAITING_LIMIT, factor=1.0, what="response formats to be compiled")
        # With this factor one caller gets one of two.
        self._turns = FairQueue(capacity=THREAD_COUNT, factor=1.0)
        # One thread each: an executor of two would start the second one later, without the large stack.
        self._idle = [
            concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"grammar-{index}")
            for index in range(THREAD_COUNT)
        ]
        self._all = tuple(self._idle)

    def start(self) -> None:
        """Start reading the vocabulary, so that the first request need not wait for it."""
        if self._compiler is None:
            return
        # An executor starts its thread at the first task, with the stack size set at that time.
        usual = threading.stack_size(self._compiler.stack_bytes(self._byte_limit))
        try:
            for executor in self._all:
                executor.submit(self._compiler.prepare)
        finally:
            threading.stack_size(usual)

    async def compile(self, form: ResponseFormat, *, field: str = _FIELD) -> Grammar:
        """Return the format's grammar; raises InvalidRequest that names the field, or Overloaded if no thread
        becomes free in time."""
        if self._compiler is None:
            raise InvalidRequest(Reason.UNSUPPORTED, "this server cannot constrain outputs", field=field)
        size = size_bytes(form)
        if size > self._byte_limit:
            raise InvalidRequest(
                Reason.GRAMMAR_TOO_COMPLEX,
                f"{field} has {size} bytes in UTF-8; the limit is {self._byte_limit}; shorten it",
                field=field,
                metadata={"size_bytes": size, "limit_bytes": self._byte_limit},
            )
        if (cached := self._compiler.kept(form)) is not None:
            return cached
        origin = callers.origin.get()
        has_begun = False
        with self._waiting.hold(origin):
            try:
                async with asyncio.timeout(self._timeout_s):
                    hold = await self._turns.take(origin)
                    has_begun = True
                    executor = self._idle.pop()

                    def done() -> None:
                        self._idle.append(executor)
                        hold.release()

                    return await ended(executor.submit(self._compiler.compile, form), done)
            except TimeoutError as error:
                raise (self._too_slow(field) if has_begun else self._busy()) from error

    def close(self) -> None:
        """Accept no more work; running work finishes."""
        for executor in self._all:
            executor.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _too_slow(self, field: str) -> IcehouseError:
        return InvalidRequest(
            Reason.GRAMMAR_TOO_COMPLEX,
            f"{field} could not be compiled within {self._timeout_s:g} s; simplify it",
            field=field,
            metadata={"timeout_s": f"{self._timeout_s:g}"},
        )

    def _busy(self) -> IcehouseError:
        return Overloaded(
            Reason.QUEUE_FULL,
            f"{self._turns.waiting_count} response formats are waiting to be compiled; try again later",
            retry_after_s=_RETRY_S,
            metadata={"waiting": self._turns.waiting_count, "waiting_limit": WAITING_LIMIT},
        )
