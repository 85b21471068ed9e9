"""Bearer token of a connection, kept until the server refuses it and then asked for anew.

A source is whatever returns a token when it is called: it reads a file that is written again, or asks an
identity provider. Of `AsyncClient` it may return an awaitable.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable

TokenSource = Callable[[], str | Awaitable[str]]
"""Returns the token that is valid now."""


class BearerToken:
    """What proves who calls. Safe for use from several threads; a source is called by one at a time."""

    def __init__(self, source: str | TokenSource) -> None:
        self._source = source
        self._known = source if isinstance(source, str) else None
        self._lock = threading.Lock()

    @property
    def known(self) -> str | None:
        """The token to send where the source need not be asked."""
        return self._known

    def current(self) -> str:
        """Return the token to send, empty for none."""
        with self._lock:
            if self._known is None:
                token = self._asked()
                if not isinstance(token, str):
                    if inspect.iscoroutine(token):
                        token.close()
                    raise TypeError(f"the token's source returned a {type(token).__name__}, not a string")
                self._known = token
            return self._known

    async def current_async(self) -> str:
        """As `current`, with a source that may return an awaitable."""
        if self._known is not None:
            return self._known
        token = self._asked()
        self._known = known = token if isinstance(token, str) else await token
        return known

    def is_renewed(self, refused: str) -> bool:
        """Return whether there may be another token than the one that the server refused; forget that one."""
        if isinstance(self._source, str):
            return False
        with self._lock:
            if self._known == refused:
                self._known = None
        return True

    def _asked(self) -> str | Awaitable[str]:
        return self._source if isinstance(self._source, str) else self._source()
