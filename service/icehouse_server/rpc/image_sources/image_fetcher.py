"""Image fetcher: reads the files and URLs that a conversation names, before it is rendered.

The images of a request are read concurrently, with one time limit for all. Reading files and resolving names
block, so a few threads do that. Callers take turns for threads and for memory; one caller gets at most half
of either.

Hosts are hardly trusted. A name is resolved here, and the connection goes to an address that was checked, so
a different second answer of the resolver changes nothing. Redirects obey the same rules. No body is read
beyond the limit, and nothing is decompressed. The environment's proxies are not used, and no cookie or
password is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import socket
import ssl
import stat
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import httpcore2

from icehouse_server.config import ServerConfig
from icehouse_server.domain.chat import ChatMessage, Conversation, ImageSource, PlacedImage
from icehouse_server.errors import SourceUnreachable
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.shares import FairQueue, ended, start_daemon
from icehouse_server.rpc.image_sources.image_address import (
    FileAddress,
    IpAddress,
    SourceRules,
    WebAddress,
    ip_address_of,
    refused,
    too_long,
    unreachable,
)

Result = TypeVar("Result")

_THREAD_COUNT: Final = 16
"""Most files being read and names being resolved at once, for all callers."""


class ImageFetcher:
    """Reads images from allowed folders and hosts."""

    def __init__(self, config: ServerConfig) -> None:
        self._rules = SourceRules.of(config)
        self._config = config
        self._turns = FairQueue(capacity=_THREAD_COUNT, factor=1.0)
        """Turns for threads. These are daemons, so one that hangs does not keep the process from ending."""
        self._web = WebReader(
            self._rules, resolve=lambda host: self._in_thread(functools.partial(addresses_of, host))
        )
        self._memory = FairQueue(capacity=config.request_memory_bytes, factor=1.0)

    @contextlib.asynccontextmanager
    async def fetched(self, conversation: Conversation) -> AsyncIterator[Conversation]:
        """Yield the conversation with the bytes of all images; their memory is held until the block ends.

        Raises InvalidRequest, which names the faulty image, and SourceUnreachable for one that may be
        available later.
        """
        images = conversation.images
        named = {source.uri: source for source in images if source.uri}
        if not named or len(images) > self._config.max_images:  # too many are refused where all are counted
            yield conversation
            return
        addresses = {uri: self._rules.address_of(uri, field=_field(source)) for uri, source in named.items()}
        with contextlib.ExitStack() as held:
            try:
                async with asyncio.timeout(self._config.image_fetch_timeout_s):
                    size_bytes = len(named) * self._config.max_image_bytes
                    memory = await self._memory.take(callers.origin.get(), size_bytes)
                    held.callback(memory.release)
                    found = await self._read_all([(addresses[uri], named[uri]) for uri in named])
            except TimeoutError as error:
                timeout_s = f"{self._config.image_fetch_timeout_s:g}"
                complaint = f"and those after it were not read within {timeout_s} s"
                first = next(iter(named.values()))
                raise unreachable(_field(first), complaint, timeout_s=timeout_s) from error
            memory.shrink(sum(len(data) for data in found))
            yield _with_bytes(conversation, dict(zip(named, found, strict=True)))

    async def _read_all(
        self, wanted: Sequence[tuple[FileAddress | WebAddress, ImageSource]]
    ) -> Sequence[bytes]:
        tasks = [asyncio.create_task(self._read(address, _field(source))) for address, source in wanted]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # Tasks without a thread must leave the queue before the memory is given back.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, address: FileAddress | WebAddress, field: str) -> bytes:
        limit_bytes = self._config.max_image_bytes
        if isinstance(address, FileAddress):
            read = functools.partial(read_file, address, limit_bytes=limit_bytes, field=field)
            return await self._in_thread(read)
        return await self._web.read(address, limit_bytes=limit_bytes, field=field)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns; callers take turns."""
        hold = await self._turns.take(callers.origin.get())
        return await ended(start_daemon(work, name="image-source"), hold.release)


def _field(source: ImageSource) -> str:
    return f"{source.field}.uri"


def _with_bytes(conversation: Conversation, found: Mapping[str, bytes]) -> Conversation:
    def image(placed: PlacedImage) -> PlacedImage:
        source = placed.source
        if not source.uri:
            return placed
        return dataclasses.replace(placed, source=dataclasses.replace(source, data=found[source.uri]))

    def message(each: ChatMessage) -> ChatMessage:
        return dataclasses.replace(each, images=tuple(image(placed) for placed in each.images))

    return dataclasses.replace(conversation, messages=tuple(message(each) for each in conversation.messages))


_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CHUNK_BYTES: Final = 256 << 10


def read_file(address: FileAddress, *, limit_bytes: int, field: str) -> bytes:
    """Return a file's bytes; raises InvalidRequest if it cannot be read or has more than `limit_bytes`.

    No link is followed below the folder, and only a regular file with one name is read: those who may write
    into the folder must not choose what else the server reads. A path that is missing, forbidden or not a
    file gets the same error. Not on the event loop.
    """
    unreadable = refused(field, "is not a file the server can read; links, hard ones too, are not followed")
    with contextlib.ExitStack() as opened:

        def opening(path: str, flags: int, *, folder: int | None = None) -> int:
            descriptor = os.open(path, flags, dir_fd=folder)
            opened.callback(os.close, descriptor)
            return descriptor

        try:
            folder = opening(address.folder, _FOLDER_FLAGS)
            *above, name = address.names
            for each in above:
                folder = opening(each, _FOLDER_FLAGS | os.O_NOFOLLOW, folder=folder)
            # Check before opening: opening a device may have side effects.
            if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise unreadable
            file = opening(name, _FILE_FLAGS, folder=folder)
            facts = os.fstat(file)
            # A file with a second name may come from elsewhere: somebody may have linked one of ours here.
            if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
                raise unreadable
            if facts.st_size > limit_bytes:
                raise too_long(field, limit_bytes)
            data = bytearray()
            # The file may grow meanwhile.
            while chunk := os.read(file, min(_CHUNK_BYTES, limit_bytes + 1 - len(data))):
                data += chunk
                if len(data) > limit_bytes:
                    raise too_long(field, limit_bytes)
            return bytes(data)
        except OSError as error:
            raise unreadable from error


Resolve = Callable[[str], Awaitable[Sequence[IpAddress]]]
"""Returns the addresses of a name; raises OSError if it has none."""

_ADDRESS_COUNT: Final = 4
_CONNECT_S: Final = 4.0
"""Time limit for connecting to one address of a host; another address may answer."""
_REDIRECT_COUNT: Final = 3
_MEDIA_TYPE: Final = re.compile(r"image/.*|(application|binary)/octet-stream|", re.IGNORECASE)
"""Media types of answers that may be images; the bytes show which format it is."""
_HEADERS: Final[Mapping[bytes | str, bytes | str]] = {
    "User-Agent": "icehouse",
    "Accept": "image/png, image/jpeg, image/webp, image/gif",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_LATER: Final = frozenset({408, 425, 429})


class WebReader:
    """Reads URLs of allowed hosts with GET requests, following redirects. The caller limits the time."""

    def __init__(self, rules: SourceRules, *, resolve: Resolve, tls: ssl.SSLContext | None = None) -> None:
        self._rules = rules
        self._resolve = resolve
        self._tls = tls or (ssl.create_default_context() if rules.hosts else None)

    async def read(self, address: WebAddress, *, limit_bytes: int, field: str) -> bytes:
        """Return the body of a 200; raises InvalidRequest, or SourceUnreachable if a later try may work."""
        for _ in range(_REDIRECT_COUNT + 1):
            found = await self._get(address, limit_bytes=limit_bytes, field=field)
            if isinstance(found, bytes):
                return found
            address = found
        raise refused(field, f"is redirected more than {_REDIRECT_COUNT} times")

    async def _get(self, address: WebAddress, *, limit_bytes: int, field: str) -> bytes | WebAddress:
        url = httpcore2.URL(
            scheme="https" if address.is_secure else "http",
            host=address.host,
            port=address.port,
            target=address.target,
        )
        backend = _CheckedAddresses(await self._addresses(address, field))
        try:
            async with (
                httpcore2.AsyncConnectionPool(ssl_context=self._tls, network_backend=backend) as pool,
                pool.stream("GET", url, headers={"Host": address.authority, **_HEADERS}) as response,
            ):
                headers = {
                    name.decode("latin-1").lower(): value.decode("latin-1")
                    for name, value in response.headers
                }
                if response.status in _REDIRECTS:
                    return self._next(address, headers.get("location", ""), field)
                _check(response.status, headers, limit_bytes=limit_bytes, field=field)
                return await _body(response, limit_bytes=limit_bytes, field=field)
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
            complaint = "cannot be fetched: its host cannot be reached, or its TLS certificate is not valid"
            raise unreachable(field, complaint) from error
        except (httpcore2.NetworkError, httpcore2.RemoteProtocolError) as error:
            raise _broken_off(field) from error

    async def _addresses(self, address: WebAddress, field: str) -> list[IpAddress]:
        literal = ip_address_of(address.host)
        try:
            found = [literal] if literal is not None else await self._resolve(address.host)
        except OSError as error:
            raise unreachable(field, "cannot be fetched: the name of its host has no address") from error
        allowed = [
            ip
            for ip in found
            if self._rules.reaches(ip, address.port, host=address.host, is_secure=address.is_secure)
        ]
        if not allowed:
            raise refused(field, "is on a host whose name has no public or allowed address")
        return allowed[:_ADDRESS_COUNT]

    def _next(self, address: WebAddress, location: str, field: str) -> WebAddress:
        try:
            uri = urllib.parse.urljoin(address.uri, location)
        except ValueError:
            uri = ""
        if not uri.lower().startswith(("https:", "http:")):
            raise refused(field, "is redirected to something that is not an http(s) URL")
        found = self._rules.web_address_of(uri, field=field)
        if address.is_secure and not found.is_secure:
            raise refused(field, "is redirected from https to http")
        return found


class _CheckedAddresses(httpcore2.AnyIOBackend):
    """Connects to the first of these addresses that answers, whatever the host's name."""

    def __init__(self, addresses: Sequence[IpAddress]) -> None:
        self._addresses = addresses

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        failure: Exception = httpcore2.ConnectError("no address")
        for ip in self._addresses:
            try:
                return await super().connect_tcp(str(ip), port, timeout=_CONNECT_S)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


def addresses_of(host: str) -> list[IpAddress]:
    """Return the addresses of a name from the system's resolver; raises OSError. May take long."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # the text cannot be a host name
        raise OSError(f"{host!r} is no name") from error
    addresses = (ip_address_of(str(address[0])) for *_, address in found)
    return list(dict.fromkeys(address for address in addresses if address is not None))


def _check(status: int, headers: Mapping[str, str], *, limit_bytes: int, field: str) -> None:
    """Refuse answers whose headers show that they cannot be an image."""
    if status in _LATER or status >= 500:
        raise unreachable(field, f"cannot be fetched: its host answers {status}", status=status)
    if status != 200:
        raise refused(field, f"cannot be fetched: its host answers {status}", status=status)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise refused(field, "was sent compressed, though it was requested uncompressed")
    media_type = headers.get("content-type", "").partition(";")[0].strip()
    if _MEDIA_TYPE.fullmatch(media_type) is None:
        raise refused(field, "is not an image, according to its Content-Type")
    if int(headers.get("content-length", "0")) > limit_bytes:
        raise too_long(field, limit_bytes)


async def _body(response: httpcore2.Response, *, limit_bytes: int, field: str) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_stream():
        data += chunk
        if len(data) > limit_bytes:
            raise too_long(field, limit_bytes)
    if not data:
        raise _broken_off(field)
    return bytes(data)


def _broken_off(field: str) -> SourceUnreachable:
    complaint = "cannot be fetched: its host closed the connection, or its answer is not valid HTTP"
    return unreachable(field, complaint)
