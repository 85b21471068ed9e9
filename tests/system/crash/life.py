"""Life of a cache directory through many killed processes, and what must hold after each of them.

A killed server cannot say what it had committed, so it writes that down while it lives: a line behind each
row that was committed and one before each that goes. A kill keeps what was written; so whatever the lines
say is there must be there, row and file, when the next process comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icehouse_server.clock import SystemClock
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.data_keys import find_key
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.offline import OfflineStore
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.store_paths import StorePaths

GARBAGE = frozenset({ReconcileFinding.PARTIAL, ReconcileFinding.ADOPTABLE})
"""What a crash may leave: a file that was not committed, or one whose row was deleted first."""
MASTER_KEYS = (bytes(32), bytes([1]) * 32)


def write_ledger(ledger: str, room_bytes: int | None) -> None:
    """Runs in a server's process: note what is committed and what goes; have the disk full after so much."""
    descriptor = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    insert, delete = Manifest.insert, Manifest.delete

    def noted_insert(self: Manifest, items: Any, **rest: Any) -> None:
        insert(self, items, **rest)
        os.write(descriptor, "".join(f"+{record.hash.hex()}\n" for record, _ in items).encode())

    def noted_delete(self: Manifest, hashes: Any) -> None:
        os.write(descriptor, "".join(f"-{block_hash.hex()}\n" for block_hash in hashes).encode())
        delete(self, hashes)

    for name, action in (("insert", noted_insert), ("delete", noted_delete)):
        setattr(Manifest, name, action)
    if room_bytes is not None:
        _fill_after(room_bytes)


def _fill_after(room_bytes: int) -> None:
    left_bytes = room_bytes
    write, unlink = Files.write, Files.unlink

    def limited_write(self: Files, descriptor: int, parts: Any, *, offset: int) -> None:
        nonlocal left_bytes
        wanted_bytes = sum(memoryview(part).nbytes for part in parts)
        if wanted_bytes > left_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left_bytes -= wanted_bytes
        write(self, descriptor, parts, offset=offset)

    def counted_unlink(self: Files, path: str) -> None:
        nonlocal left_bytes
        size_bytes = os.path.getsize(path) if os.path.exists(path) else 0
        unlink(self, path)
        left_bytes += size_bytes

    for name, action in (("write", limited_write), ("unlink", counted_unlink)):
        setattr(Files, name, action)


@dataclasses.dataclass
class CacheLife:
    """One directory; with `key_file` its blocks are encrypted."""

    directory: Path
    ledger: Path
    key_file: Path | None = None
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """What was seen, for whoever reads the summary."""
    _known: set[str] = dataclasses.field(default_factory=set)
    """What was there at the last check."""

    def __post_init__(self) -> None:
        if self.key_file is not None:
            self.set_key(MASTER_KEYS[0])

    def set_key(self, master_key: bytes) -> None:
        """Have the next server open the directory with this key."""
        assert self.key_file is not None, "a directory in the clear has no key"
        self.key_file.write_text(master_key.hex())
        self.key_file.chmod(0o600)

    @property
    def options(self) -> tuple[str, ...]:
        """The flags that a server needs for it."""
        return () if self.key_file is None else ("--cache-key-file", str(self.key_file))

    def hook(self, *, room_bytes: int | None = None) -> Callable[[], None]:
        """What a server's process calls before it serves."""
        return functools.partial(write_ledger, str(self.ledger), room_bytes)

    def opening_keys(self) -> list[bytes]:
        """Return the master keys that open the directory."""
        paths = StorePaths(str(self.directory))
        return [key for key in MASTER_KEYS if find_key(Files(), paths, master_key=key) is not None]

    def offline(self) -> OfflineStore:
        """Return the directory as `icehouse cache` sees it."""
        cipher = None
        if self.key_file is not None:
            master_key = bytes.fromhex(self.key_file.read_text())
            paths = StorePaths(str(self.directory))
            data_key = find_key(Files(), paths, master_key=master_key)
            cipher = None if data_key is None else Cipher(data_key)
        return OfflineStore(str(self.directory), files=Files(), clock=SystemClock(), cipher=cipher)

    def forget(self) -> None:
        """Somebody removes blocks from outside: what is there may be gone."""
        self.ledger.unlink(missing_ok=True)
        self._known = set()

    def check(self, *, allowed: frozenset[ReconcileFinding] = GARBAGE) -> None:
        """Prove that nothing committed is lost, that every row has its file, and that each file is right."""
        store = self.offline()
        records = {record.hash.hex(): record for record in store.rows().records}
        lost = self._committed() - records.keys()
        assert not lost, f"committed blocks are lost: {sorted(lost)}"
        found, _ = store.check(progress=lambda count: None)
        assert [item for item in found if item.finding not in allowed] == []
        damaged = [verdict for verdict in store.verify(tuple(records.values())) if verdict.damage]
        assert damaged == [] or ReconcileFinding.MISSING in allowed, damaged
        assert list(self.directory.glob("quarantine/*")) == [], "a crash was taken for damage"
        self.counts["blocks verified"] += len(records)
        self.counts["directories checked"] += 1
        self.forget()
        self._known = set(records)

    def _committed(self) -> set[str]:
        there = set(self._known)
        text = ""
        with contextlib.suppress(FileNotFoundError):
            text = self.ledger.read_text()
        for line in text.splitlines():
            name = line[1:]
            if line.startswith("+"):
                there.add(name)
            else:
                there.discard(name)
        self.counts["blocks committed"] += text.count("+")
        return there
