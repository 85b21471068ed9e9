"""Connection of an image's fetch: made to an address that was checked, and bounded in what it takes in.

Owned by a thread that waits for its host; the event loop may break it off (`FetchAbort`), and does when the
time is over or the caller has left.
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import threading
from typing import Final

from icehouse_server.rpc.image_sources.address import IpAddress, WebAddress

_CONNECT_S: Final = 4.0
"""For one of a host's addresses, of which another may answer; its TLS included."""


class AnswerTooLong(Exception):
    """More has come than an answer may have."""


class FetchAbort:
    """Breaks off a fetch that another thread waits for: what that thread does with its socket fails at once.

    Without it a host that sends a byte now and then would keep a thread, whatever the time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_due = False

    def set(self) -> None:
        """Break it off, now or as soon as it has a connection."""
        with self._lock:
            self._is_due = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is not connected yet, or no more
                    # Not that of SSLSocket, which would take the TLS away that the other thread reads by.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def hold(self, opened: socket.socket) -> None:
        """Note what the thread uses from now on; raises ConnectionAbortedError when that is over."""
        with self._lock:
            self._socket = opened
            if self._is_due:
                raise ConnectionAbortedError("the fetch was broken off")

    def let_go(self) -> None:
        """Note that it uses nothing any more: what is closed then may be another's next."""
        with self._lock:
            self._socket = None


class MeteredSocket:
    """What `http.client` uses of a socket, of which no more can be read than an answer may have.

    That module bounds lines and headers, but neither what stands between chunks nor what comes after a
    chunk whose length is negative.
    """

    def __init__(self, inner: socket.socket, *, limit_bytes: int) -> None:
        self._inner = inner
        self._limit_bytes = limit_bytes

    def sendall(self, data: bytes) -> None:
        """Send all of it."""
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return what reads the answer; raises AnswerTooLong from its reads."""
        assert mode == "rb", mode
        return io.BufferedReader(_MeteredStream(self._inner, self._limit_bytes))

    def close(self) -> None:
        """Leave it to whoever opened it."""


class _MeteredStream(io.RawIOBase):
    def __init__(self, inner: socket.socket, left_bytes: int) -> None:
        super().__init__()
        self._inner = inner
        self._left_bytes = left_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        count = self._inner.recv_into(buffer)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise AnswerTooLong
        return count


def open_connection(
    place: IpAddress,
    address: WebAddress,
    *,
    tls: ssl.SSLContext | None,
    timeout_s: float,
    abort: FetchAbort,
) -> socket.socket:
    """Connect to one address of a host, which proves its name where there is TLS; raises OSError.

    Each operation on what is returned takes so long at most. Whoever gets it closes it, after
    `abort.let_go()`.
    """
    family = socket.AF_INET if place.version == 4 else socket.AF_INET6
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.settimeout(min(_CONNECT_S, timeout_s))
        abort.hold(opened)
        opened.connect((str(place), address.port))
        if tls is not None:
            secure = tls.wrap_socket(opened, server_hostname=address.host, do_handshake_on_connect=False)
            opened = secure
            abort.hold(opened)
            secure.do_handshake()
        opened.settimeout(timeout_s)
    except BaseException:
        abort.let_go()
        opened.close()
        raise
    return opened
