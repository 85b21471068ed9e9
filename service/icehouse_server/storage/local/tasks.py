"""Tasks: orders that may take long, done piece by piece. Each is a generator that returns its result."""

from __future__ import annotations

import bisect
from collections.abc import Generator

from icehouse_server.domain.blocks import Damage
from icehouse_server.storage.api import Failure, Names, Purged, Verified
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.block_format.header import BlockFileError
from icehouse_server.storage.local.directory.record import BlockRecord
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.storage_stats import note_damage

_PURGE_BATCH_COUNT = 64


def purge(store: BlockStore, names: Names) -> Generator[None, None, Purged]:
    """Remove blocks in batches, pinned ones too: an order outranks a pin."""
    stored = [name for name in names if name in store.index]
    block_count = size_bytes = 0
    for start in range(0, len(stored), _PURGE_BATCH_COUNT):
        if start:
            yield
        # Looked up now: what was replaced meanwhile is removed too, what is gone is gone.
        records = map(store.index.get, stored[start : start + _PURGE_BATCH_COUNT])
        batch = [record for record in records if record is not None]
        store.remove(batch)
        store.tier.purged_block_total += len(batch)
        block_count += len(batch)
        size_bytes += sum(record.file_bytes for record in batch)
    return Purged(block_count, size_bytes)


def verify(store: BlockStore, names: Names | None) -> Generator[None, None, Verified]:
    """Read and hash one file at a time and compare it with its row; None: all of them."""
    wanted = [record.hash for record in store.index] if names is None else list(names)
    checked_count = checked_bytes = 0
    damaged: list[Failure] = []
    for number, name in enumerate(wanted):
        if number:
            yield
        record = store.index.get(name)
        if record is None:
            continue  # it was evicted meanwhile
        store.last_verified = name
        failure = _verify(store, record)
        if failure is not None and failure.cause is Damage.MEMORY:
            continue  # the file may be whole
        checked_count += 1
        checked_bytes += record.file_bytes
        store.integrity.verified_block_total += 1
        if failure is not None:
            damaged.append(failure)
            note_damage(store.integrity, failure)
            store.retire(failure)
    return Verified(checked_count, checked_bytes, tuple(damaged))


def list_all(store: BlockStore, block_limit: int) -> Generator[None, None, Names]:
    """Return the stored names in the order of hashes, beginning behind the last one verified. One piece."""
    yield from ()
    hashes = sorted(record.hash for record in store.index)
    start = 0 if store.last_verified is None else bisect.bisect_right(hashes, store.last_verified)
    return tuple([*hashes[start:], *hashes[:start]][: block_limit or None])


def _verify(store: BlockStore, record: BlockRecord) -> Failure | None:
    """Return what is wrong with a stored block."""
    path = store.paths.block(record.fingerprint, record.hash)
    try:
        file = verify_block(store.files, path, cipher=store.cipher)
        if not record.is_of(file):
            # If it was replaced and its row could not be written, the row is written now.
            store.check_rows([record.hash])
            record = store.index.get(record.hash) or record
        if not (record.is_of(file) and store.manifest.holds(file)):
            raise BlockFileError(Damage.MISMATCH, "its row is not what its file says")
    except BlockFileError as error:
        return Failure(error.damage, str(error), record.hash)
    return None
