"""Response formats to grammars, off the event loop, one at a time and within limits.

The compiler descends recursively and cannot be interrupted, so its thread gets a stack that fits the
largest form allowed, and a form that takes too long is given up on by its caller only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

from icehouse_server.domain.response_format import Grammar, ResponseFormat, size_bytes
from icehouse_server.errors import IcehouseError, InvalidRequest, Overloaded, Reason
from icehouse_server.rpc.engine_client.ports import GrammarPort

WAITING_LIMIT = 256
"""Forms that may wait for the compiler; most take milliseconds."""

_FIELD = "response_format"
_RETRY_S = 1.0
_LEAST_STACK_BYTES = 16 << 20


class GrammarCompilers:
    """Runs a compiler in a thread of its own. Owned by the event loop; `close` ends it."""

    def __init__(self, compiler: GrammarPort | None, *, byte_limit: int, timeout_s: float) -> None:
        self._compiler = compiler
        self._byte_limit = byte_limit
        self._timeout_s = timeout_s
        self._waiting_count = 0
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def start(self) -> None:
        """Have the vocabulary read, so that the first request need not wait for it."""
        if self._compiler is None:
            return
        # An executor makes its thread at the first task, with the stack that is set then.
        stack_bytes = max(_LEAST_STACK_BYTES, self._byte_limit * self._compiler.stack_bytes_per_byte)
        usual = threading.stack_size(stack_bytes)
        try:
            self._executor.submit(self._compiler.prepare)
        finally:
            threading.stack_size(usual)

    async def compile(self, form: ResponseFormat) -> Grammar:
        """Return the form's grammar; raises InvalidRequest, or Overloaded when its turn does not come."""
        if self._compiler is None:
            raise InvalidRequest(Reason.UNSUPPORTED, "this server cannot constrain outputs", field=_FIELD)
        size = size_bytes(form)
        if size > self._byte_limit:
            raise InvalidRequest(
                Reason.GRAMMAR_TOO_COMPLEX,
                f"{_FIELD} has {size} bytes in UTF-8; the limit is {self._byte_limit}; shorten it",
                field=_FIELD,
                metadata={"size_bytes": size, "limit_bytes": self._byte_limit},
            )
        if self._waiting_count >= WAITING_LIMIT:
            raise self._busy()
        task = self._executor.submit(self._compiler.compile, form)
        self._waiting_count += 1
        try:
            return await asyncio.wait_for(asyncio.wrap_future(task), self._timeout_s)
        except TimeoutError as error:
            # What had begun goes on; what had not was taken back.
            raise (self._busy() if task.cancelled() else self._too_slow()) from error
        finally:
            self._waiting_count -= 1

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _too_slow(self) -> IcehouseError:
        return InvalidRequest(
            Reason.GRAMMAR_TOO_COMPLEX,
            f"{_FIELD} was not compiled within {self._timeout_s:g} s; simplify it",
            field=_FIELD,
            metadata={"timeout_s": f"{self._timeout_s:g}"},
        )

    def _busy(self) -> IcehouseError:
        return Overloaded(
            Reason.QUEUE_FULL,
            f"{self._waiting_count} response formats wait to be compiled; try again later",
            retry_after_s=_RETRY_S,
            metadata={"waiting": self._waiting_count, "waiting_limit": WAITING_LIMIT},
        )
