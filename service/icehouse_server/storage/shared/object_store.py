"""Object store: the port of what servers share, and the one implementation of it, through obstore.

S3 and what speaks its protocol, Google's and Azure's stores, and a folder that all servers mount. An object
is put whole or not at all, and is never changed but for another whole one. No call lists anything.
Credentials come from the environment, under each provider's usual names, and stay inside obstore.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # Of an optional extra: loaded only where a store is configured.
    from obstore.store import ObjectStore as Client

CHUNK_BYTES = 4 << 20
"""Of an object, as it is read."""
_CONNECT_S = 2
_REQUEST_S = 60
"""No request takes longer; who waits for one gives up much earlier."""


class StoreError(Exception):
    """The store did not answer, or refused. Says so for operators, without address or credentials."""


class ObjectStore(Protocol):
    """Whole objects by name. Every method raises `StoreError`; whoever calls sets the deadline."""

    async def size_bytes(self, name: str) -> int | None:
        """Return how large an object is; None where there is none."""
        ...

    def read(self, name: str) -> AsyncIterator[memoryview]:
        """Yield an object's bytes; nothing where there is none."""
        ...

    async def read_beginning(self, name: str, size_bytes: int) -> bytes:
        """Return the first bytes of an object that has at least so many."""
        ...

    async def put(self, name: str, data: bytes, *, replaces: bool) -> bool:
        """Put a whole object; False where one has that name and is not to be replaced. Stores without such a
        condition replace it."""
        ...

    async def delete(self, name: str) -> None:
        """Delete an object; one that is gone is fine."""
        ...


class ObstoreStore:
    """An `ObjectStore` in a bucket, a container or a folder, below the path of its URL."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._has_conditions = True

    async def size_bytes(self, name: str) -> int | None:
        with _store_errors():
            try:
                return int((await self._client.head_async(name))["size"])
            except FileNotFoundError:
                return None

    async def read(self, name: str) -> AsyncIterator[memoryview]:
        with _store_errors():
            try:
                result = await self._client.get_async(name)
            except FileNotFoundError:
                return
            async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield memoryview(chunk)

    async def read_beginning(self, name: str, size_bytes: int) -> bytes:
        with _store_errors():
            return bytes(await self._client.get_range_async(name, start=0, length=size_bytes))

    async def put(self, name: str, data: bytes, *, replaces: bool) -> bool:
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        # One request for all of it: what dies in the middle leaves nothing behind, no parts either.
        with _store_errors():
            if self._has_conditions and not replaces:
                try:
                    await self._client.put_async(name, data, mode="create", use_multipart=False)
                    return True
                except AlreadyExistsError:
                    return False
                except (NotImplementedError, NotSupportedError):
                    self._has_conditions = False
            await self._client.put_async(name, data, use_multipart=False)
            return True

    async def delete(self, name: str) -> None:
        with _store_errors(), contextlib.suppress(FileNotFoundError):
            await self._client.delete_async(name)


def open_store(url: str) -> ObstoreStore:
    """Return the store at a URL such as s3://bucket/path. Asks nothing of it. Raises ImportError without
    obstore, ValueError for a URL that names no store, OSError for a folder that cannot be made."""
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, from_url

    if url.startswith("file:"):
        folder = Path(url.removeprefix("file:").removeprefix("//"))
        if not folder.is_absolute():
            raise ValueError("a folder is named by file:// and an absolute path")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ObstoreStore(LocalStore(folder))
    options: Any = {
        "connect_timeout": f"{_CONNECT_S}s",
        "timeout": f"{_REQUEST_S}s",
        # Whoever gives an endpoint that begins with http:// wants it so; without one it is https.
        "allow_http": True,
    }
    try:
        # What is retried, and when, is decided above: where nobody is made to wait for it.
        return ObstoreStore(from_url(url, client_options=options, retry_config={"max_retries": 0}))
    except BaseError as error:
        raise ValueError(str(error).partition("\n")[0]) from error


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Turn what obstore raises into `StoreError`; its own words have addresses."""
    from obstore import exceptions

    try:
        yield
    except StoreError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StoreError("the object store refuses these credentials") from error
    except (exceptions.BaseError, OSError, ValueError) as error:
        if "DispatchFailure" in str(error) or "error sending request" in str(error):
            raise StoreError("the object store cannot be reached") from error
        if "No space left" in str(error) or "507" in str(error):
            raise StoreError("the object store is full") from error
        raise StoreError(f"the object store answers with {type(error).__name__}") from error
