"""A disk that can be full, fail, lose power and rot; everything else is the system's.

Power loss is played on a copy of the directory: changes that no fsync made durable are undone first, a
rename included. Rename is atomic (POSIX; journaling file systems keep that over a power cut), so
one that is undone brings back the file it replaced: the name is never without either. The copy
takes the manifest's write-ahead log along as a killed process leaves it, and a power cut
may take the last transactions with it. Where a process alone ends, killed or in order, nothing is
undone, and what it had not made durable is the next one's to lose (`heir`).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icehouse_server.storage.files import FileInfo, Files

from tests.fixtures.storage.faults import Crash

_FREE_BYTES = 1 << 40
_FIRST_MTIME_NS = 10**18
_WAL_HEAD_BYTES = 32
_FRAME_HEAD_BYTES = 24
_CHECKPOINT_FRAMES = 256
_SCHEMA_TRANSACTIONS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class _Replaced:
    """A file that another one replaced, as it is after a power cut."""

    data: bytes
    mtime_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Rename:
    """A rename that no sync of a folder has made durable."""

    source: str
    target: str
    replaced: _Replaced | None

    def undo(self) -> None:
        """Put both files back; a file removed since stays removed."""
        if not os.path.exists(self.target):
            return
        os.rename(self.target, self.source)
        if self.replaced is not None:
            Path(self.target).write_bytes(self.replaced.data)
            os.utime(self.target, ns=(self.replaced.mtime_ns, self.replaced.mtime_ns))


class SimDisk:
    """The `Files` of one process. Modification times count up, folders are listed by name."""

    def __init__(self, root: Path, *, mtime_ns: int = _FIRST_MTIME_NS) -> None:
        self.root = root
        self.mtime_ns = mtime_ns
        self.room_bytes: int | None = None
        """Bytes that may still be written before the disk is full; None: no limit."""
        self.fail_in: int | None = None
        """Number of calls until one fails with EIO."""
        self.crash_in: int | None = None
        """Number of calls until power is lost, half of the time before that call is carried out."""
        self.crashes_before = False
        self.crash_verb = ""
        """Power is lost before the next call of this verb."""
        self.failed_count = 0
        self.has_crashed = False
        self._system = Files()
        self._paths: dict[int, str] = {}
        self._unsynced: set[str] = set()
        self._renames: list[_Rename] = []

    def __getattr__(self, verb: str) -> Any:
        action = getattr(self._system, verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.has_crashed:
                # Clean-up code runs in this simulation only; a dead process does nothing more.
                raise Crash
            if verb == self.crash_verb:
                self.has_crashed = True
                raise Crash
            self._count_to_crash(before=True)
            self._maybe_fail(verb, args)
            replaced = self._replaced(args[1]) if verb == "rename" else None
            result = self._note(verb, args, action(*args, **kwargs))
            if verb == "rename":
                self._note_rename(_Rename(args[0], args[1], replaced))
            self._count_to_crash(before=False)
            return result

        return call

    def keep_power(self) -> None:
        """Cancel all planned power losses."""
        self.crash_in, self.crash_verb = None, ""

    def used_bytes(self) -> int:
        """Return the bytes of all files, the write-ahead log's included."""
        return _file_bytes(self.root)

    def block_bytes(self) -> int:
        """Return the bytes of all block files, unfinished and quarantined ones included."""
        folders = (self.root / "blocks", self.root / "quarantine")
        return sum(_file_bytes(folder) for folder in folders if folder.is_dir())

    def crash(self, copy: Path) -> None:
        """Lose power now; `copy` becomes what the next process finds."""
        self.has_crashed = True
        blocks = str(self.root / "blocks")
        for path in self._unsynced:
            if os.path.exists(path) and path.startswith(blocks):
                os.truncate(path, os.path.getsize(path) // 2)
        for rename in reversed(self._renames):
            rename.undo()
        shutil.copytree(self.root, copy, ignore=shutil.ignore_patterns("*-shm"))

    def kill(self, copy: Path) -> None:
        """Kill only the process; `copy` becomes what the next one finds."""
        self.has_crashed = True
        shutil.copytree(self.root, copy, ignore=shutil.ignore_patterns("*-shm"))

    def heir(self, root: Path) -> SimDisk:
        """Return the disk of the next process on the same machine; `root` is the directory, or its copy."""
        disk = SimDisk(root, mtime_ns=self.mtime_ns)

        def moved(path: str) -> str:
            return str(root / os.path.relpath(path, self.root))

        disk._unsynced = {moved(path) for path in self._unsynced}
        disk._renames = [
            _Rename(moved(rename.source), moved(rename.target), rename.replaced) for rename in self._renames
        ]
        return disk

    def release(self) -> None:
        """Close the files that the dead process had open, as the system does."""
        for descriptor in self._paths:
            os.close(descriptor)
        self._paths.clear()

    def _count_to_crash(self, *, before: bool) -> None:
        if self.crash_in is None or self.crashes_before is not before:
            return
        self.crash_in -= 1
        if self.crash_in <= 0:
            self.has_crashed = True
            raise Crash

    def _maybe_fail(self, verb: str, args: tuple[Any, ...]) -> None:
        if verb == "write" and self.room_bytes is not None:
            size_bytes = sum(memoryview(part).nbytes for part in args[1])
            if size_bytes > self.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "injected")
            self.room_bytes -= size_bytes
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in <= 0:
                self.fail_in = None
                self.failed_count += 1
                if verb == "close":
                    self._system.close(args[0])
                    self._note(verb, args, None)
                raise OSError(errno.EIO, os.strerror(errno.EIO), f"injected into {verb}")

    def _note(self, verb: str, args: tuple[Any, ...], result: Any) -> Any:
        """Note changes that are not durable yet, and replace real times in the result."""
        if verb in ("create", "open", "lock"):
            self._paths[result] = args[0]
        if verb == "create":
            self._unsynced.add(args[0])
        elif verb == "write":
            self.mtime_ns += 1000
            os.utime(args[0], ns=(self.mtime_ns, self.mtime_ns))
        elif verb == "close":
            self._paths.pop(args[0], None)
        elif verb == "fsync":
            self._unsynced.discard(self._paths[args[0]])
        elif verb == "fsync_dir":
            # A sync of either folder makes the rename durable: the system orders them in one journal.
            self._renames = [
                rename
                for rename in self._renames
                if args[0] not in map(os.path.dirname, (rename.source, rename.target))
            ]
        elif verb == "unlink" and self.room_bytes is not None:
            self.room_bytes += 900
        elif verb == "list":
            return sorted(result, key=_name_of)
        elif verb == "free_bytes":
            return _FREE_BYTES if self.room_bytes is None else self.room_bytes
        return result

    def _replaced(self, path: str) -> _Replaced | None:
        """Return the file that a rename is about to replace; None if there is none."""
        if not os.path.isfile(path):
            return None
        data = Path(path).read_bytes()
        kept_bytes = len(data) // 2 if path in self._unsynced else len(data)
        return _Replaced(data[:kept_bytes], os.stat(path).st_mtime_ns)

    def _note_rename(self, rename: _Rename) -> None:
        self._renames.append(rename)
        self._unsynced.discard(rename.target)
        if rename.source in self._unsynced:
            self._unsynced.remove(rename.source)
            self._unsynced.add(rename.target)


def _name_of(info: FileInfo) -> str:
    return info.name


@dataclasses.dataclass(frozen=True, slots=True)
class Rot:
    """Changes made to block files from outside, by file name."""

    what: str
    before: Mapping[str, bytes]
    after: Mapping[str, bytes]
    """Contents of the files now; empty for a removed one."""


def rot(disk: SimDisk, dice: random.Random) -> Rot | None:
    """Damage committed block files behind the server's back; None if there are none."""
    found = sorted((disk.root / "blocks").glob("*/*.safetensors"))
    if not found:
        return None
    victim = dice.choice(found)
    kind = dice.choice(("flip", "flip", "truncate", "delete", "swap"))
    touched = [victim]
    before = {victim.stem: victim.read_bytes()}
    disk.mtime_ns += 1000
    if kind == "flip":
        _flip(victim, dice, mtime_ns=victim.stat().st_mtime_ns if dice.random() < 0.7 else disk.mtime_ns)
    elif kind == "truncate":
        os.truncate(victim, dice.randrange(victim.stat().st_size))
        os.utime(victim, ns=(disk.mtime_ns, disk.mtime_ns))
    elif kind == "delete":
        victim.unlink()
        os.utime(victim.parent, ns=(disk.mtime_ns, disk.mtime_ns))
    else:
        other = dice.choice(found)
        aside = victim.with_suffix(".aside")
        victim.rename(aside)
        if other != victim:
            before[other.stem] = other.read_bytes()
            other.rename(victim)
            touched.append(other)
        aside.rename(other)
        os.utime(victim.parent, ns=(disk.mtime_ns, disk.mtime_ns))
        if other == victim:
            return None
    after = {path.stem: path.read_bytes() if path.exists() else b"" for path in touched}
    return Rot(kind, before, after)


def _flip(path: Path, dice: random.Random, *, mtime_ns: int) -> None:
    data = bytearray(path.read_bytes())
    head_bytes = 8 + int.from_bytes(data[:8], "little")
    # Half of the flips are in the arrays, though the head is much longer.
    is_inside = head_bytes < len(data) and dice.random() < 0.5
    data[dice.randrange(head_bytes if is_inside else 0, len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def lose_last_transactions(manifest: Path, count: int) -> bool:
    """Cut the last transactions off a write-ahead log, as a power cut may; False if that is not safe.

    A log long enough to have been folded into the database was synced before, and is left alone.
    """
    log = manifest.with_name(manifest.name + "-wal")
    if not log.exists():
        return False
    data = log.read_bytes()
    if len(data) <= _WAL_HEAD_BYTES:
        return False
    (page_bytes,) = struct.unpack(">I", data[8:12])
    salt = data[16:24]
    ends = []
    offset = _WAL_HEAD_BYTES
    frame_bytes = _FRAME_HEAD_BYTES + page_bytes
    while data[offset + 8 : offset + 16] == salt:
        offset += frame_bytes
        if data[offset - frame_bytes + 4 : offset - frame_bytes + 8] != bytes(4):
            ends.append(offset)
    # The first transactions make the schema, which must stay.
    schema_count = 0 if manifest.stat().st_size > 2 * page_bytes else _SCHEMA_TRANSACTIONS
    if len(ends) <= count + schema_count or offset > _CHECKPOINT_FRAMES * frame_bytes:
        return False
    os.truncate(log, ends[-1 - count])
    return True


def _file_bytes(folder: Path | str) -> int:
    """Return the bytes of all files below a folder; asked after every action of a story."""
    size_bytes = 0
    with os.scandir(folder) as found:
        for item in found:
            size_bytes += _file_bytes(item.path) if item.is_dir() else item.stat().st_size
    return size_bytes
