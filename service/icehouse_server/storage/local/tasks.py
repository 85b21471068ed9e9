"""Tasks: orders that may take long, done piece by piece. Each is a generator that ends with its result."""

from __future__ import annotations

import bisect
from collections.abc import Generator

from icehouse_server.domain.blocks import Damage
from icehouse_server.storage.api import Failure, Names, Purged, Verified
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.block_format.header import BlockFileError
from icehouse_server.storage.local.directory.record import BlockRecord
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.stats import note_damage

_PURGE_BATCH_COUNT = 64


def purge(store: BlockStore, names: Names) -> Generator[None, None, Purged]:
    """Remove blocks in batches, pinned ones too: an order outranks a pin."""
    stored = [name for name in names if name in store.index]
    block_count = size_bytes = 0
    for start in range(0, len(stored), _PURGE_BATCH_COUNT):
        if start:
            yield
        # As they are now: what was replaced meanwhile is removed too, what is gone is gone.
        found = (store.index.get(name) for name in stored[start : start + _PURGE_BATCH_COUNT])
        batch = [record for record in found if record is not None]
        store.purge(batch)
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
        # One that was evicted meanwhile has nothing left to verify.
        record = store.index.get(name)
        if record is None:
            continue
        store.last_verified = name
        failure = _verify(store, record)
        if failure is not None and failure.cause is Damage.MEMORY:
            continue  # nothing was learned of it
        checked_count += 1
        checked_bytes += record.file_bytes
        store.integrity.verified_block_total += 1
        if failure is not None:
            damaged.append(failure)
            note_damage(store.integrity, failure)
            retire(store, failure)
    return Verified(checked_count, checked_bytes, tuple(damaged))


def list_all(store: BlockStore, block_limit: int) -> Generator[None, None, Names]:
    """Name the stored blocks, in the order of their hashes and round again: those that were verified last
    come last. One piece."""
    yield from ()
    hashes = sorted(record.hash for record in store.index)
    start = 0 if store.last_verified is None else bisect.bisect_right(hashes, store.last_verified)
    return tuple([*hashes[start:], *hashes[:start]][: block_limit or None])


def _verify(store: BlockStore, record: BlockRecord) -> Failure | None:
    """Say what is wrong with a stored block."""
    path = store.paths.block(record.fingerprint, record.hash)
    try:
        file = verify_block(store.files, path, cipher=store.cipher)
        if not record.is_of(file):
            # Replaced, and its row not made up for yet? Then it is now, and is as its file says.
            store.check_rows([record.hash])
            record = store.index.get(record.hash) or record
        if not (record.is_of(file) and store.manifest.holds(file)):
            raise BlockFileError(Damage.MISMATCH, "its row is not what its file says")
    except BlockFileError as error:
        return Failure(error.damage, str(error), record.hash)
    return None


def retire(store: BlockStore, failure: Failure) -> None:
    """Take a block that could not be used out of the store. Raises `OSError` or `sqlite3.Error`."""
    record = None if failure.hash is None else store.index.get(failure.hash)
    if record is None or failure.cause is Damage.MEMORY:
        return
    if failure.cause is Damage.MISSING:
        # Replaced meanwhile, it is there again, and is not to be forgotten by those who count.
        if not store.has_file(record):
            store.drop_missing(record.hash)
    elif failure.header_checksum in (None, record.header_checksum):
        store.quarantine(record.hash)
