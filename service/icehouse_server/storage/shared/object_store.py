"""Object store: the port of the storage that servers share, and its one implementation, through obstore.

It can be S3 or a store with its protocol, Google's or Azure's store, or a folder that all servers mount. An
object is put whole or not at all, and changes only by being replaced as a whole. No call lists objects.
Credentials come from the environment, under each provider's usual names, and stay inside obstore.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # From an optional extra: loaded only if a store is configured.
    from obstore.store import ObjectStore as Client

CHUNK_BYTES = 4 << 20
"""Bytes of an object that are read at a time."""
_CONNECT_S = 2
_REQUEST_S = 60
"""No request takes longer; its caller gives up much earlier."""
_STATUS = re.compile(r"status code: (\d{3})\b")
"""In obstore's error text, which also contains the name of a block and the store's own answer."""
_INSUFFICIENT_STORAGE = "507"


class StoreError(Exception):
    """The store did not answer, or refused. The message is for operators, without address or credentials."""


class ObjectStore(Protocol):
    """Whole objects by name. Every method raises `StoreError`; the caller sets the deadline."""

    async def size_bytes(self, name: str) -> int | None:
        """Return the size of an object; None if there is none."""

    def read(self, name: str) -> AsyncGenerator[memoryview]:
        """Yield an object's bytes, for as long as the caller asks; nothing if there is no object."""

    async def put(self, name: str, data: bytes, *, replaces: bool) -> bool:
        """Put a whole object; False if one has that name and must not be replaced. Stores without conditional
        puts replace it."""

    async def delete(self, name: str) -> None:
        """Delete an object; one that is gone is fine."""


class ObstoreStore:
    """An `ObjectStore` in a bucket, a container or a folder, below the path of its URL."""

    def __init__(self, make_client: Callable[[], Client]) -> None:
        """`make_client` may wait for a disk. It is called when the store is first used, and again until it
        succeeds."""
        self._make_client = make_client
        self._made: Client | None = None
        self._has_conditions = True

    async def size_bytes(self, name: str) -> int | None:
        with _store_errors():
            client = await self._client()
            try:
                return int((await client.head_async(name))["size"])
            except FileNotFoundError:
                return None

    async def read(self, name: str) -> AsyncGenerator[memoryview]:
        with _store_errors():
            client = await self._client()
            try:
                result = await client.get_async(name)
            except FileNotFoundError:
                return
            async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield memoryview(chunk)

    async def put(self, name: str, data: bytes, *, replaces: bool) -> bool:
        # A single request: if it dies in the middle it leaves nothing behind, no parts either.
        with _store_errors():
            client = await self._client()
            if self._has_conditions and not replaces:
                try:
                    await client.put_async(name, data, mode="create", use_multipart=False)
                    return True
                except _exceptions().AlreadyExistsError:
                    return False
                except (NotImplementedError, _exceptions().NotSupportedError):
                    self._has_conditions = False
            await client.put_async(name, data, use_multipart=False)
            return True

    async def delete(self, name: str) -> None:
        with _store_errors(), contextlib.suppress(FileNotFoundError):
            await (await self._client()).delete_async(name)

    async def _client(self) -> Client:
        if self._made is None:
            self._made = await asyncio.to_thread(self._make_client)
        return self._made


def make_store(url: str) -> ObstoreStore:
    """Return the store at a URL such as s3://bucket/path. Sends no request, and makes no folder: a missing
    one may be a disk that is not mounted. Raises ImportError without obstore, ValueError for a URL that names
    no store."""
    from obstore.store import LocalStore, from_url

    if url.startswith("file:"):
        folder = url.removeprefix("file:").removeprefix("//")
        if not folder.startswith("/"):
            raise ValueError("a folder is named by file:// and an absolute path")
        return ObstoreStore(lambda: LocalStore(folder))
    options: Any = {
        "connect_timeout": f"{_CONNECT_S}s",
        "timeout": f"{_REQUEST_S}s",
        # If the endpoint begins with http:// that is wanted; without an endpoint it is https.
        "allow_http": True,
    }
    try:
        # Our callers decide what is retried and when, so that no request waits for it.
        client = from_url(url, client_options=options, retry_config={"max_retries": 0})
    except _exceptions().BaseError as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    return ObstoreStore(lambda: client)


def _exceptions() -> ModuleType:
    """Return obstore's exceptions."""
    from obstore import exceptions

    return exceptions


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Turn what obstore raises into `StoreError`, because its own texts contain addresses."""
    errors = _exceptions()
    try:
        yield
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise StoreError("the object store refuses these credentials") from error
    except TimeoutError:
        raise
    except (errors.BaseError, OSError, ValueError) as error:
        if "DispatchFailure" in str(error) or "error sending request" in str(error):
            raise StoreError("the object store cannot be reached") from error
        found = _STATUS.search(str(error))
        status = found and found[1]
        if "No space left" in str(error) or status == _INSUFFICIENT_STORAGE:
            raise StoreError("the object store is full") from error
        told = f"status {status}" if status else type(error).__name__
        raise StoreError(f"the object store answers with {told}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class SharedSettings:
    """Limits of the traffic with the store."""

    lookup_timeout_s: float
    """Maximum time of one lookup, and so of the delay that a slow store causes a request."""
    write_bytes_per_s: int
    """Average rate at which all blocks are stored; 0 is unlimited."""
    object_limit_bytes: int
    """A larger object is no block of this server's model."""
    silence_s: float = 2.0
    """A read that receives nothing for this long is given up."""
    put_timeout_s: float = 60.0
