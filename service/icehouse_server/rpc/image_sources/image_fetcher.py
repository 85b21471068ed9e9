"""Image sources of a conversation: the files and URLs that it names, read before the conversation is.

The images of a request are read side by side, with one time limit for all. Reading blocks, so it has a few
threads. Callers take turns for them, and for memory; one caller gets at most half of either.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, TypeVar

from icehouse_server.config import ServerConfig
from icehouse_server.domain.chat import ChatMessage, Conversation, ImageSource, PlacedImage
from icehouse_server.errors import InvalidRequest, SourceUnreachable
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.shares import FairQueue, on_loop
from icehouse_server.rpc.image_sources.image_address import (
    FileAddress,
    SourceRules,
    WebAddress,
    refused,
    too_long,
    unreachable,
)
from icehouse_server.rpc.image_sources.web_reader import FetchAbort, WebReader

Result = TypeVar("Result")

_THREAD_COUNT: Final = 16
"""Images that are read at once, of all callers."""


class ImageFetcher:
    """Reads images from folders and hosts that are allowed."""

    def __init__(self, config: ServerConfig) -> None:
        self._rules = SourceRules.of(config)
        self._config = config
        self._turns = FairQueue(capacity=_THREAD_COUNT, factor=1.0)
        """For threads, which are daemons: one that hangs does not keep the process from ending."""
        self._web = WebReader(self._rules, timeout_s=config.image_fetch_timeout_s)
        self._memory = FairQueue(capacity=config.request_memory_bytes, factor=1.0)

    @contextlib.asynccontextmanager
    async def fetched(self, conversation: Conversation) -> AsyncIterator[Conversation]:
        """Give the conversation with the bytes of all images, for as long as they may be kept.

        Raises InvalidRequest, which names the image at fault, and SourceUnreachable for one that may be there
        later.
        """
        images = conversation.images
        named = {source.uri: source for source in images if source.uri}
        if not named or len(images) > self._config.max_images:  # so many are refused where all are counted
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
                raise self._late(next(iter(named.values()))) from error
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
            # Those without a thread must leave the queue before the memory is given back.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, address: FileAddress | WebAddress, field: str) -> bytes:
        limit_bytes = self._config.max_image_bytes
        if isinstance(address, FileAddress):
            read = functools.partial(read_file, address, limit_bytes=limit_bytes, field=field)
            return await self._in_thread(read)
        abort = FetchAbort()
        fetch = functools.partial(self._web.read, address, limit_bytes=limit_bytes, field=field, abort=abort)
        try:
            return await self._in_thread(fetch)
        finally:
            abort.set()  # of use where the time is over or the caller has left

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns; callers take turns."""
        hold = await self._turns.take(callers.origin.get())
        task: concurrent.futures.Future[Result] = concurrent.futures.Future()
        # A caller that leaves does not stop work that has begun, so its turn lasts until that ends.
        loop = asyncio.get_running_loop()
        task.add_done_callback(lambda _: on_loop(loop, hold.release))
        task.set_running_or_notify_cancel()
        try:
            threading.Thread(target=_settle, args=(task, work), name="image-source", daemon=True).start()
        except RuntimeError as error:  # the system gives no thread; the turn is given back all the same
            task.set_exception(error)
        return await asyncio.wrap_future(task)

    def _late(self, source: ImageSource) -> SourceUnreachable:
        timeout_s = self._config.image_fetch_timeout_s
        complaint = f"and those after it were not read within {timeout_s:g} s"
        return unreachable(_field(source), complaint, timeout_s=f"{timeout_s:g}")


def _settle(task: concurrent.futures.Future[Result], work: Callable[[], Result]) -> None:
    try:
        result = work()
    except BaseException as error:
        task.set_exception(error)
    else:
        task.set_result(result)


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
_CHUNK_BYTES: Final = 1 << 20


def read_file(address: FileAddress, *, limit_bytes: int, field: str) -> bytes:
    """Return a file's bytes; raises InvalidRequest when it cannot be read or has more of them than that.

    No link is followed below the folder, and only a plain file with one name is read: whoever may write into
    the folder must not choose what else the server reads. A file that is missing, forbidden or no file is
    refused in the same words. Not on the event loop.
    """
    with contextlib.ExitStack() as opened:
        try:
            return _read(opened, address, limit_bytes=limit_bytes, field=field)
        except OSError as error:
            raise _unreadable(field) from error


def _read(opened: contextlib.ExitStack, address: FileAddress, *, limit_bytes: int, field: str) -> bytes:
    def keep(descriptor: int) -> int:
        opened.callback(os.close, descriptor)
        return descriptor

    place = keep(os.open(address.folder, _FOLDER_FLAGS))
    *above, name = address.names
    for each in above:
        place = keep(os.open(each, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=place))
    # Checked before it is opened: opening a device may do something.
    if not stat.S_ISREG(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
        raise _unreadable(field)
    file = keep(os.open(name, _FILE_FLAGS, dir_fd=place))
    facts = os.fstat(file)
    # A file with another name may be from elsewhere: somebody may have linked one of ours here.
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        raise _unreadable(field)
    if facts.st_size > limit_bytes:
        raise too_long(field, limit_bytes)
    data = bytearray()
    # The file may grow meanwhile.
    while chunk := os.read(file, min(_CHUNK_BYTES, limit_bytes + 1 - len(data))):
        data += chunk
        if len(data) > limit_bytes:
            raise too_long(field, limit_bytes)
    return bytes(data)


def _unreadable(field: str) -> InvalidRequest:
    return refused(field, "is no file that the server can read; links, hard ones too, are not followed")
