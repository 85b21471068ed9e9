"""Disconnect of a caller while its call waits to write.

gRPC reports it as an error of the server (`InternalError`), when it is the caller who went away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc


@contextlib.contextmanager
def disconnect_as_cancel() -> Iterator[None]:
    """End the call as a cancelled one where its connection ends before it took what the block sends."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
