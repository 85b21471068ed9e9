"""The ledger: every request, every committed block and all damage, recorded outside the server."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from icehouse_server.domain.blocks import BlockDamage, BlockHeader, RegionKind, TokenKeys
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.events import CacheReport, Delta, Event, Failed, Finished, Started
from icehouse_server.domain.ids import BlockHash, CacheScope
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from icehouse_server.storage.api import (
    BlockPersisted,
    BlocksEvicted,
    BlocksLoaded,
    Inventory,
    Outcome,
    StorageFailure,
    Ticket,
    Verified,
)
from icehouse_server.storage.local.directory.manifest import BlockRecord

from tests.system.sim.disk import Rot
from tests.system.sim.images import image_token_count
from tests.system.sim.model import Reply

if TYPE_CHECKING:
    from tests.system.sim.server import SimServer

_ORDINARY_ERRORS = (Cancelled, DeadlineExceeded, Overloaded, Unavailable)


@dataclasses.dataclass(slots=True)
class Promise:
    """One request and the reply that it must get."""

    request: GenerationRequest
    reply: Reply
    model: int

    @property
    def writes(self) -> bool:
        return self.request.cache_use in (CacheUse.READ_WRITE, CacheUse.WRITE_ONLY)

    @property
    def history(self) -> TokenKeys:
        return self.keys + self.reply.token_ids

    @property
    def keys(self) -> TokenKeys:
        return self.request.keys(self.request.prompt_token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class Imported:
    """A prompt whose blocks may have come from an archive, and who may use them."""

    scope: CacheScope
    model: int
    keys: TokenKeys


def _kinds(record: BlockRecord) -> frozenset[RegionKind]:
    return frozenset(kind for kind in RegionKind if record.region_bytes(kind))


class Ledger:
    """Survives the server's crashes, and checks each of its outcomes."""

    def __init__(self) -> None:
        self.committed: dict[BlockHash, frozenset[RegionKind]] = {}
        """Each with the regions that the SSD tier reported."""
        self.removed: set[BlockHash] = set()
        self.spilled: set[BlockHash] = set()
        self.ordered_away: set[BlockHash] = set()
        """Blocks that this process was ordered to remove, and that the engine has not spilled again."""
        self.damaged: set[BlockHash] = set()
        """Blocks whose files were changed behind the server's back and not rewritten since."""
        self.rot_count = 0
        self._sound: dict[BlockHash, bytes] = {}
        """Contents of damaged blocks' files before the damage."""
        self._mended: set[BlockHash] = set()
        """Blocks that were damaged and are sound again: a read in between may still report the damage."""
        self._rotten: dict[BlockHash, bytes] = {}
        """Contents of damaged blocks' files after the damage."""
        self.ever_damaged: set[BlockHash] = set()
        self.may_be_gone: set[BlockHash] = set()
        """Blocks that were being removed when power was lost."""
        self.has_lost_rows = False
        """Whether the manifest's last transactions were lost with the power."""
        self.io_error_count = 0
        self.spill_numbers: dict[BlockHash, int] = {}
        self.spill_number = 0
        self.promises: list[Promise] = []
        self.imported: list[Imported] = []
        self._manifest_bytes = 0
        self.last_stats: CacheStats | None = None
        self.seen: Counter[str] = Counter()
        """How often each thing happened, so that tests can check that the stories reach it."""

    def note_spill(self, header: BlockHeader) -> None:
        """Record that a block was handed to the SSD tier."""
        block = header.hash
        self.spilled.add(block)
        self.ordered_away.discard(block)
        self.spill_number += 1
        self.spill_numbers[block] = self.spill_number

    def note_rot(self, rot: Rot) -> None:
        """Record that files were changed; a file's name is its block's hash."""
        self.rot_count += 1
        for name in rot.before:
            block = BlockHash(bytes.fromhex(name))
            if block not in self.damaged:
                self._sound[block] = rot.before[name]
            self.ever_damaged.add(block)
            self._rotten[block] = rot.after[name]
            # Two files that were swapped may be swapped back.
            if rot.after[name] == self._sound[block]:
                self.damaged.discard(block)
                self._mended.add(block)
            else:
                self.damaged.add(block)

    def note_outcome(self, message: Outcome, served: SimServer) -> None:
        """Check an outcome of the SSD tier against the ledger."""
        outcome = message.outcome if isinstance(message, Ticket) else message
        self.seen[type(outcome).__name__] += 1
        if isinstance(outcome, BlockPersisted):
            self.committed[outcome.record.hash] = _kinds(outcome.record)
            file = _file_of(served, outcome.record.hash)
            self.seen["blocks in planes"] += b"stored_bytes" in file
            # A file may rot after its last sync, but before its row and this report.
            if self._rotten.pop(outcome.record.hash, None) != file:
                self.damaged.discard(outcome.record.hash)
            self._check_size(served)
        elif isinstance(outcome, BlocksEvicted):
            for block in outcome.hashes:
                self.committed.pop(block, None)
            self.removed.update(outcome.hashes)
        elif isinstance(outcome, CacheStats):
            self.last_stats = outcome
        elif isinstance(outcome, StorageFailure) and isinstance(outcome.cause, BlockDamage):
            self._check_failure(outcome, served)
        elif isinstance(outcome, BlocksLoaded) and outcome.failure is not None:
            self._check_failure(outcome.failure, served)
        elif isinstance(outcome, Verified):
            # Reported at the end of a long task: damaged blocks may have been rewritten since.
            sound = [failure for failure in outcome.damaged if failure.hash not in self.ever_damaged]
            for failure in sound:
                self._check_failure(failure, served)
        elif isinstance(outcome, Inventory) and served.store.is_open:
            self._check_opened(served)

    def _check_size(self, served: SimServer) -> None:
        """Assert that a block was written only if it fits beside the manifest and its log."""
        manifest_bytes = served.store.space.manifest_bytes
        # The server need not account for a file of another size that was put in a block's place.
        if manifest_bytes == self._manifest_bytes and not self.ever_damaged:
            total = served.disk.block_bytes() + manifest_bytes
            assert total <= served.setup.disk_limit_bytes, (
                f"{total} bytes, {served.setup.disk_limit_bytes} allowed"
            )
        self._manifest_bytes = manifest_bytes

    def _check_failure(self, failure: StorageFailure, served: SimServer) -> None:
        """Assert that a block reported as damaged was damaged."""
        self.seen[f"failure {failure.cause}"] += 1
        assert failure.hash is not None
        if failure.hash in self.damaged | self._mended or self.io_errors(served):
            return
        may_miss = failure.cause is BlockDamage.MISSING and failure.hash in self.removed
        assert may_miss, f"a sound block was called damaged: {failure}"

    def _check_opened(self, served: SimServer) -> None:
        """Assert that a restart lost no committed block, added none, and found no wrong row."""
        store = served.store
        present = {record.hash: _kinds(record) for record in store.index}
        expected = self.committed.keys() - self.damaged - self.may_be_gone
        if self.has_lost_rows:
            expected -= self.removed
        lost = expected - present.keys()
        assert not lost, f"committed blocks were lost: {[name.hex()[:8] for name in lost]}, {store.report}"
        poorer = [name.hex()[:8] for name in expected if not self.committed[name] <= present[name]]
        assert not poorer, f"committed blocks lost regions: {poorer}, {store.report}"
        strange = present.keys() - self.spilled
        assert not strange, f"blocks nobody spilled: {[name.hex()[:8] for name in strange]}"
        if not (self.damaged or self.has_lost_rows or self.io_errors(served)):
            report = store.report
            lies = (report.row_deleted_count, report.quarantined_count, report.other_layout_deleted_count)
            assert lies == (0, 0, 0) and not report.manifest_rebuilt, f"a row lied: {report}"
        self.seen["adopted"] += store.report.adopted_count
        self.seen["clean open"] += store.report.clean
        self.seen["partial"] += store.report.partial_deleted_count
        self.committed = present
        self.may_be_gone = set()
        self.has_lost_rows = False

    def io_errors(self, served: SimServer) -> int:
        """Return how many calls the disk has failed so far: that may cost blocks, never tokens."""
        return self.io_error_count + served.disk.failed_count

    def check_end(self, promise: Promise, events: list[Event]) -> None:
        """Assert that a request ended once, with the right tokens, and reused only blocks that it may."""
        request, reply = promise.request, promise.reply
        name = request.request_id
        end = events[-1]
        assert isinstance(end, Finished | Failed), f"{name} has not ended: {end}"
        ends = [e for e in events if isinstance(e, Finished | Failed)]
        starts = [e for e in events if isinstance(e, Started)]
        assert len(ends) == 1 and len(starts) <= 1, f"{name} ended {len(ends)} times, began {len(starts)}"
        tokens = tuple(t for e in events if isinstance(e, Delta) for t in e.token_ids)
        text = "".join(e.text for e in events if isinstance(e, Delta))
        for start in starts:
            assert start is events[0], name
            self._check_reuse(promise, start.cache)
        if isinstance(end, Failed):
            self.seen[type(end.error).__name__] += 1
            assert isinstance(end.error, _ORDINARY_ERRORS), f"{name} failed: {end.error!r}"
            assert tokens == reply.token_ids[: len(tokens)], f"{name} drew {tokens} of {reply.token_ids}"
            return
        self.seen[end.reason.name] += 1
        assert tokens == reply.token_ids, f"{name} drew {tokens}, not {reply.token_ids}; {end.usage.cache}"
        assert (text, end.reason) == (reply.text, reply.reason), f"{name}: {text!r} {end.reason}, not {reply}"
        assert end.usage.cache == starts[0].cache, name
        assert end.usage.output_token_count == len(tokens), name

    def knows(self, scope: CacheScope, model: int, prefix: TokenKeys) -> bool:
        """Whether this scope may have blocks of these tokens: it computed them, or imported them."""
        count = len(prefix)
        return any(
            each.writes
            and each.model == model
            and each.request.scope == scope
            and each.history[:count] == prefix
            for each in self.promises
        ) or any(
            each.model == model and each.scope == scope and each.keys[:count] == prefix
            for each in self.imported
        )

    def _check_reuse(self, promise: Promise, report: CacheReport) -> None:
        request = promise.request
        count = report.cached_token_count
        self.seen["ram tokens"] += report.ram_token_count
        self.seen["ssd tokens"] += report.ssd_token_count
        self.seen[f"limit {report.limit.name}"] += 1
        self.seen["shared tokens"] += count if request.shared_scope not in (None, request.scope) else 0
        assert count <= len(request.prompt_token_ids) - 1, f"{request.request_id}: the last token must run"
        if request.cache_use in (CacheUse.OFF, CacheUse.WRITE_ONLY):
            assert count == 0, f"{request.request_id} reused {count} tokens against its will"
        prefix = promise.keys[:count]
        self.seen["reused image tokens"] += image_token_count(prefix)
        scopes = (request.scope, request.shared_scope)
        known = any(self.knows(scope, promise.model, prefix) for scope in scopes if scope is not None)
        assert known or count == 0, f"{request.request_id} reused {count} tokens that are nobody's to share"


def _file_of(served: SimServer, block: BlockHash) -> bytes:
    """Return the content of a block's file; empty if there is none."""
    found = list((served.disk.root / "blocks").glob(f"*/{block.hex()}.safetensors"))
    return found[0].read_bytes() if found else b""
