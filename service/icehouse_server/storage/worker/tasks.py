"""Tasks: purges and verifications that may be long, done piece by piece."""

from __future__ import annotations

import bisect
from typing import Protocol

from icehouse_server.domain.blocks import Damage
from icehouse_server.storage.block_facts import BlockFile
from icehouse_server.storage.block_format.damage import BlockFileError
from icehouse_server.storage.block_format.reader import verify_block
from icehouse_server.storage.directory.store import BlockStore
from icehouse_server.storage.loads import BlockFailure
from icehouse_server.storage.messages import Listed, Outcome, Purged, TaskId, Verified
from icehouse_server.storage.record import BlockRecord
from icehouse_server.storage.worker.requests import ListRequest, PurgeRequest, VerifyRequest
from icehouse_server.storage.worker.stats import note_damage

_PURGE_BATCH_COUNT = 64


class Task(Protocol):
    """A piece of ordered work in progress."""

    @property
    def task_id(self) -> TaskId:
        """What its outcome will be known by."""
        ...

    def step(self, store: BlockStore) -> Outcome | None:
        """Do one piece; return the outcome after the last one."""
        ...


class PurgeTask:
    """Removes blocks in batches, pinned ones too: an order outranks a pin."""

    def __init__(self, request: PurgeRequest) -> None:
        self.task_id = request.task_id
        self._request = request
        self._left: list[BlockRecord] | None = None
        self._next = 0
        self._block_count = 0
        self._size_bytes = 0

    def step(self, store: BlockStore) -> Outcome | None:
        """Remove one batch."""
        if self._left is None:
            found = (store.index.get(block_hash) for block_hash in self._request.hashes)
            self._left = [record for record in found if record is not None]
        batch = self._left[self._next : self._next + _PURGE_BATCH_COUNT]
        self._next += len(batch)
        # As they are now: what was replaced meanwhile is removed too, what is gone is gone.
        found = (store.index.get(record.hash) for record in batch)
        batch = [record for record in found if record is not None]
        store.purge(batch)
        self._block_count += len(batch)
        self._size_bytes += sum(record.file_bytes for record in batch)
        is_done = self._next >= len(self._left)
        return Purged(self.task_id, self._block_count, self._size_bytes) if is_done else None


class VerifyTask:
    """Reads and hashes one file per step and compares it with its row."""

    def __init__(self, request: VerifyRequest) -> None:
        self.task_id = request.task_id
        self._request = request
        self._left: list[BlockRecord] | None = None
        self._checked_count = 0
        self._checked_bytes = 0
        self._damaged: list[BlockFailure] = []

    def step(self, store: BlockStore) -> Outcome | None:
        """Verify one block."""
        if self._left is None:
            asked = self._request.hashes
            found = (store.index.get(item) for item in asked) if asked is not None else list(store.index)
            self._left = [record for record in found if record is not None][::-1]
        if self._left:
            # One that was evicted meanwhile has nothing left to verify.
            wanted = self._left.pop().hash
            record = store.index.get(wanted)
            if record is not None:
                self._verify(record, store)
            store.last_verified = wanted
        if self._left:
            return None
        return Verified(self.task_id, self._checked_count, self._checked_bytes, tuple(self._damaged))

    def _verify(self, record: BlockRecord, store: BlockStore) -> None:
        try:
            file = verify_block(
                store.files, store.paths.block(record.fingerprint, record.hash), cipher=store.cipher
            )
            if not record.is_of(file):
                # Replaced, and its row not made up for yet? Then it is now, and is as its file says.
                store.check_row(record)
                record = store.index.get(record.hash) or record
            check_row(record, file, store)
        except BlockFileError as error:
            if error.damage is Damage.MEMORY:
                return  # nothing was learned of it
            note_damage(store.integrity, error.damage)
            failure = BlockFailure(record.hash, error.damage, str(error))
            self._damaged.append(failure)
            retire(store, failure)
        self._checked_count += 1
        self._checked_bytes += record.file_bytes
        store.integrity.verified_block_total += 1


class ListTask:
    """Names the stored blocks, in the order of their hashes and round again: those that were verified last
    come last. One step."""

    def __init__(self, request: ListRequest) -> None:
        self.task_id = request.task_id
        self._block_limit = request.block_limit

    def step(self, store: BlockStore) -> Outcome | None:
        """Name them."""
        hashes = sorted(record.hash for record in store.index)
        start = 0 if store.last_verified is None else bisect.bisect_right(hashes, store.last_verified)
        hashes = [*hashes[start:], *hashes[:start]]
        return Listed(self.task_id, tuple(hashes[: self._block_limit or None]))


def check_row(record: BlockRecord, file: BlockFile, store: BlockStore) -> None:
    """Compare a row, its contents included, with what its file says. Raises `BlockFileError`."""
    if not (record.is_of(file) and store.manifest.holds(file)):
        raise BlockFileError(Damage.MISMATCH, f"The row of {record.hash.hex()} is not what its file says")


def retire(store: BlockStore, failure: BlockFailure) -> None:
    """Take a block that could not be used out of the store. Raises `OSError` or `sqlite3.Error`."""
    if failure.cause is Damage.MEMORY:
        return
    record = store.index.get(failure.hash)
    if record is None:
        return
    if failure.cause is Damage.MISSING:
        # Replaced meanwhile, it is there again, and is not to be forgotten by those who count.
        if not store.has_file(record):
            store.drop_missing(failure.hash)
    elif failure.header_checksum in (None, record.header_checksum):
        store.quarantine(failure.hash)
