"""Image files below allowed folders, opened step by step so that no link leads out. Not the event loop.

No link is followed below the folder, and nothing but a plain file with one name is read: whoever may
write into the folder must not choose what else the server reads. A file that is not there, may not be
read or is none is refused in the same words.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from icehouse_server.errors import InvalidRequest
from icehouse_server.rpc.image_sources.address import FileAddress
from icehouse_server.rpc.image_sources.refusals import refused, too_long

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CHUNK_BYTES: Final = 1 << 20


def read_file(address: FileAddress, *, limit_bytes: int, field: str) -> bytes:
    """Return a file's bytes; raises InvalidRequest when it cannot be read or has more of them than that."""
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
    # Looked at first: opening a device may do something.
    if not stat.S_ISREG(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
        raise _unreadable(field)
    file = keep(os.open(name, _FILE_FLAGS, dir_fd=place))
    facts = os.fstat(file)
    # One with another name may be from elsewhere: whoever may write here could have linked what is ours.
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        raise _unreadable(field)
    if facts.st_size > limit_bytes:
        raise too_long(field, limit_bytes)
    data = bytearray()
    # It may grow meanwhile.
    while chunk := os.read(file, min(_CHUNK_BYTES, limit_bytes + 1 - len(data))):
        data += chunk
        if len(data) > limit_bytes:
            raise too_long(field, limit_bytes)
    return bytes(data)


def _unreadable(field: str) -> InvalidRequest:
    return refused(field, "is no file that the server can read; links, hard ones too, are not followed")
