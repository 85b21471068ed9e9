"""Places for requests, which callers divide among themselves so that none can take them all. Event loop.

All requests share a few connections to the server, each of which takes so many calls at once.
How many places a caller may hold depends on how many nobody holds, as for the server's own callers: alone it
gets three quarters of them, and something stays free for the next one.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from icehouse_http.errors import ApiError, CallerGone

_FACTOR = 3
_RETRY_S = 1.0
_GONE_S = 2.0
"""How much longer a request whose caller went counts: beginning and ending a call is work for the server, and
many of them at once hold up the connection."""


class Places:
    """So many requests at once. `limit` is fewer than the server takes on all connections."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._held: collections.Counter[str] = collections.Counter()

    async def response(self, caller: str, answer: Callable[[], Awaitable[Response]]) -> Response:
        """Return an answer that is made and sent in a place of the caller's; raises as `hold` does."""
        place = contextlib.ExitStack()
        place.enter_context(self.hold(caller))
        with _given_back(place):
            response = await answer()
            return _HoldingResponse(response, place.pop_all())

    @contextlib.contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """Hold a place until the block ends; raises ApiError when the caller may have no more now."""
        held, total = self._held[caller], self._held.total()
        if held >= _FACTOR * (self._limit - total):
            message = (
                f"{total} requests are in flight, {held} of them yours; the limit is {self._limit}, of which "
                "part is reserved for others; try again later"
            )
            raise ApiError(429, message, code="QUEUE_FULL", retry_s=_RETRY_S)
        self._held[caller] += 1
        try:
            yield
        finally:
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]


class _HoldingResponse(Response):
    """A response behind which a place is given back."""

    def __init__(self, response: Response, place: contextlib.ExitStack) -> None:
        self._response = response
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_give_back(message: Message) -> None:
            await send(message)
            # The caller may ask again before the response has closed what it used.
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._place.close()

        with contextlib.suppress(CallerGone), _given_back(self._place):
            await self._response(scope, receive, send_and_give_back)


@contextlib.contextmanager
def _given_back(place: contextlib.ExitStack) -> Iterator[None]:
    """Give back a place behind the block, later where its caller went."""
    try:
        yield
    except CallerGone:
        asyncio.get_running_loop().call_later(_GONE_S, place.close)
        raise
    except BaseException:
        place.close()
        raise
    place.close()
