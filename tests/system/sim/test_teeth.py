"""Breaks the server on purpose, one thing at a time: some story must notice each break."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import types
from collections.abc import Callable

import pytest
import xxhash
from icehouse_server import pins
from icehouse_server.domain import blocks
from icehouse_server.domain.ids import CacheScope, Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.engine import requests
from icehouse_server.engine.core import block_log
from icehouse_server.engine.core.sequence import Phase
from icehouse_server.engine.output import Output
from icehouse_server.engine.prefix_cache import controller, prefix_cache, prefix_commands, sessions
from icehouse_server.engine.prefix_cache.tiers import account, matching, runner_port, spill, tree
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.scheduling import pass_plan, scheduler
from icehouse_server.pins import UNTIL_UNPINNED
from icehouse_server.rpc.kv_events import block_mirror, event_feed
from icehouse_server.rpc.services import cache_transfer
from icehouse_server.storage import archive
from icehouse_server.storage.api import BlocksLoaded
from icehouse_server.storage.files import Files, opened
from icehouse_server.storage.local import spiller, storage_state
from icehouse_server.storage.local.block_format import (
    block_bytes,
    block_file,
    header,
    plane_region,
    planes,
    region_input,
)
from icehouse_server.storage.local.directory import reconcile, space, store
from icehouse_server.storage.shared import fetcher, uploader

from tests.fixtures.known_blocks import record_of
from tests.system.sim import checks
from tests.system.sim.scenario import (
    ARCHIVES_SEED,
    IMAGES_SEED,
    NAMES_SEED,
    PIECES_SEED,
    PLANES_SEED,
    SHARED_SEED,
    SimulationFailed,
)
from tests.system.sim.setup import BLOCK
from tests.system.sim.stories import play

_SEED_LIMIT = 300
Break = Callable[[pytest.MonkeyPatch], None]


def believe_every_token_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matching, "common_prefix", lambda known, wanted: min(len(known), len(wanted)))


def forget_windows(patch: pytest.MonkeyPatch) -> None:
    real = runner_port.CacheFacts.needed_kinds

    def needed_kinds(self, **place):
        return tuple(kind for kind in real(self, **place) if kind != "window")

    patch.setattr(runner_port.CacheFacts, "needed_kinds", needed_kinds)


def measure_windows_one_block_short(patch: pytest.MonkeyPatch) -> None:
    real = runner_port.CacheFacts.needed_kinds

    def needed_kinds(self, *, end_token_index, token_count):
        return real(self, end_token_index=end_token_index, token_count=token_count + BLOCK)

    patch.setattr(runner_port.CacheFacts, "needed_kinds", needed_kinds)


def resume_between_checkpoints(patch: pytest.MonkeyPatch) -> None:
    real = runner_port.CacheFacts.needed_kinds

    def needed_kinds(self, **place):
        return tuple(kind for kind in real(self, **place) if kind != "checkpoint")

    patch.setattr(runner_port.CacheFacts, "needed_kinds", needed_kinds)


def take_the_kv_of_another_block(patch: pytest.MonkeyPatch) -> None:
    real = controller.Restore._put_on_device

    def put_on_device(self, loaded, runner):
        real(self, loaded, runner)
        read = [regions for regions in self.read.values() if blocks.RegionKind.KV in regions]
        kv = [regions[blocks.RegionKind.KV] for regions in read]
        for regions, other in zip(read, kv[1:], strict=False):
            regions[blocks.RegionKind.KV] = other

    patch.setattr(controller.Restore, "_put_on_device", put_on_device)


def restore_one_block_off(patch: pytest.MonkeyPatch) -> None:
    real = controller.CacheController._adopted

    def adopted(self, restore, **facts):
        real(self, restore, **facts)
        restore.sequence.processed_token_count = max(0, restore.sequence.processed_token_count - 4)

    patch.setattr(controller.CacheController, "_adopted", adopted)


def forget_the_tenant(patch: pytest.MonkeyPatch) -> None:
    real = TenantQuotas.root
    patch.setattr(TenantQuotas, "root", lambda self, scope: real(self, CacheScope(adapter=scope.adapter)))


def forget_the_adapter(patch: pytest.MonkeyPatch) -> None:
    real = TenantQuotas.root
    patch.setattr(TenantQuotas, "root", lambda self, scope: real(self, CacheScope(scope.tenant)))


def start_from_anybody(patch: pytest.MonkeyPatch) -> None:
    real = prefix_cache.PrefixCache.prompt

    def prompt(self, keys, *, scope, shared_scope=None):
        return real(self, keys, scope=scope, shared_scope=CacheScope(Tenant("other")))

    patch.setattr(prefix_cache.PrefixCache, "prompt", prompt)


def forget_which_image(patch: pytest.MonkeyPatch) -> None:
    def without_images(real):
        return lambda *, extra=b"", **rest: real(**rest)

    for module in (blocks, header, block_file):
        patch.setattr(module, "block_hash", without_images(module.block_hash))


def keep_no_image_in_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tree, "join_keys", lambda token_ids, extra: tuple(token_ids))


def begin_every_image_at_its_start(patch: pytest.MonkeyPatch) -> None:
    real = GenerationRequest.image_parts

    def image_parts(self, start, stop):
        return tuple(dataclasses.replace(part, place=0) for part in real(self, start, stop))

    patch.setattr(GenerationRequest, "image_parts", image_parts)


def name_no_image_in_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_mirror, "images_of", lambda extra: ())


def cut_images_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "_outside_images", lambda sequence, start, stop: stop)


def trust_every_region(patch: pytest.MonkeyPatch) -> None:
    real = block_file._read_verified

    def read_verified(*region, **how):
        try:
            real(*region, **how)
        except header.BlockFileError as error:
            if error.damage is not blocks.BlockDamage.CHECKSUM:
                raise

    patch.setattr(block_file, "_read_verified", read_verified)


def check_planes_after_compression(patch: pytest.MonkeyPatch) -> None:
    """Use the checksum of the compressed bytes instead of that of the tensors."""
    real = plane_region.PlaneOutput.groups

    def groups(self):
        digest = xxhash.xxh3_64()
        for group, size_bytes in real(self):
            for part in group:
                digest.update(part)
            yield group, size_bytes
        self._digest = digest

    patch.setattr(plane_region.PlaneOutput, "groups", groups)


def trust_planes_that_decode_wrongly(patch: pytest.MonkeyPatch) -> None:
    """Take the planes of 64-bit numbers in the wrong order, and trust the result."""
    real = planes.PlaneDecoder.decode

    def decode(self, sizes, stored, target, *, width):
        real(self, sizes, stored, target, width=width)
        if width == 8:
            target[:] = target.reshape(-1, 8)[:, ::-1].ravel()

    patch.setattr(planes.PlaneDecoder, "decode", decode)
    trust_every_region(patch)


def unlink_before_the_row(patch: pytest.MonkeyPatch) -> None:
    real = store.BlockStore.remove

    def remove(self, records):
        for record in records:
            if self.files.crash_in is not None:
                # By chance power is lost just here only once in thousands of stories.
                self.files.crash_in, self.files.crashes_before = 1, False
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(self.paths.block(record.fingerprint, record.hash))
        real(self, records)

    patch.setattr(store.BlockStore, "remove", remove)


class _Without:
    """The files, less one verb."""

    def __init__(self, files, verb: str) -> None:
        self._files, self._verb = files, verb

    def __getattr__(self, name):
        return (lambda _: None) if name == self._verb else getattr(self._files, name)


@contextlib.contextmanager
def _without(holder, attribute: str, verb: str):
    """Take one verb from the files that an object has."""
    files = getattr(holder, attribute)
    setattr(holder, attribute, _Without(files, verb))
    try:
        yield
    finally:
        setattr(holder, attribute, files)


def _commit_without(patch: pytest.MonkeyPatch, verb: str, *, is_replacement: bool | None = None) -> None:
    real = store.BlockStore.finish

    def finish(self, writing, **rest):
        if is_replacement not in (None, writing.file.outline.hash in self.index):
            return real(self, writing, **rest)
        with _without(self, "files", verb):
            return real(self, writing, **rest)

    patch.setattr(store.BlockStore, "finish", finish)


def never_sync_the_file(patch: pytest.MonkeyPatch) -> None:
    _commit_without(patch, "fsync")


def never_sync_the_folder(patch: pytest.MonkeyPatch) -> None:
    _commit_without(patch, "fsync_dir")


def never_sync_the_folder_of_a_new_name(patch: pytest.MonkeyPatch) -> None:
    _commit_without(patch, "fsync_dir", is_replacement=False)


def adopt_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    real = reconcile.Scan.repair

    def repair(self, items, manifest):
        with _without(self, "_files", "fsync_dir"):
            return real(self, items, manifest)

    patch.setattr(reconcile.Scan, "repair", repair)


def leak_a_pin(patch: pytest.MonkeyPatch) -> None:
    real = prefix_commands.CacheCommands._pin

    def pin(self, nodes, *rest):
        report = yield from real(self, nodes, *rest)
        self._cache.pin(nodes[-1:], UNTIL_UNPINNED)
        return report

    patch.setattr(prefix_commands.CacheCommands, "_pin", pin)


def evict_what_is_pinned(patch: pytest.MonkeyPatch) -> None:
    real = tree.PrefixTree.set_pin

    def set_pin(self, node, end_time):
        real(self, node, end_time)
        if node.ram and node.is_pinned:
            order = self.ram._order
            order[node] = 0
            order.move_to_end(node, last=False)

    patch.setattr(tree.PrefixTree, "set_pin", set_pin)
    patch.setattr(checks, "check_tree", lambda tree: None)


def end_pins_early(patch: pytest.MonkeyPatch) -> None:
    real = pins.PinEnds.take
    patch.setattr(pins.PinEnds, "take", lambda self, now_time: real(self, now_time + 0.05))


def evict_nothing_from_ram(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(account.TierAccount, "victims", lambda self, needed_bytes, **how: [])


def ignore_the_size_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(space.Space, "shortage_bytes", lambda self, size_bytes, **kwargs: 0)


def count_what_is_being_written_as_safe(patch: pytest.MonkeyPatch) -> None:
    real = spill.Spills._hand_over_next

    def hand_over_next(self):
        node = self._copying[0].node
        if node.ram:
            self._tree.store(record_of(node, *node.ram))
        real(self)

    patch.setattr(spill.Spills, "_hand_over_next", hand_over_next)


def leak_write_credit(patch: pytest.MonkeyPatch) -> None:
    real = storage_state.QueueLimit.release

    def release(self, units):
        real(self, units if units == 1 else 0)

    patch.setattr(storage_state.QueueLimit, "release", release)


def count_what_is_queued_as_persisted(patch: pytest.MonkeyPatch) -> None:
    real = spiller.Spiller.add

    def add(self, request):
        request.model.counts.spill.persisted_block_total += 1
        real(self, request)

    patch.setattr(spiller.Spiller, "add", add)


def keep_evicted_blocks_in_the_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tree.PrefixTree, "forget_stored", lambda self, block: None)


def let_failed_loads_wait(patch: pytest.MonkeyPatch) -> None:
    real = controller.CacheController._loaded

    def loaded(self, restore, outcome):
        if isinstance(outcome, BlocksLoaded) and outcome.failure is None:
            real(self, restore, outcome)

    patch.setattr(controller.CacheController, "_loaded", loaded)


def end_twice(patch: pytest.MonkeyPatch) -> None:
    real = requests.Requests.finish

    def finish(self, sequence, end):
        real(self, sequence, end)
        self.emit(sequence, end)

    patch.setattr(requests.Requests, "finish", finish)


def forget_the_tokens_of_a_stop(patch: pytest.MonkeyPatch) -> None:
    real = Output.finish

    def finish(self, sequence, reason, now):
        sequence.undelivered_token_ids.clear()
        return real(self, sequence, reason, now)

    patch.setattr(Output, "finish", finish)


def lose_the_place_of_a_cancelled_prompt(patch: pytest.MonkeyPatch) -> None:
    real = scheduler.Scheduler.remove

    def remove(self, sequence):
        if sequence.phase is not Phase.WAITING:
            real(self, sequence)

    patch.setattr(scheduler.Scheduler, "remove", remove)


def hit_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matching.LookupPrompt, "limit", property(lambda prompt: len(prompt.keys)))


def log_no_removal(patch: pytest.MonkeyPatch) -> None:
    real = block_log.BlockLog.note

    def note(self, change):
        if not isinstance(change, block_log.Left):
            real(self, change)

    patch.setattr(block_log.BlockLog, "note", note)


def lose_what_a_full_log_cannot_take(patch: pytest.MonkeyPatch) -> None:
    def note(self, change):
        if len(self._changes) < self._limit:
            self._changes.append(change)

    patch.setattr(block_log.BlockLog, "note", note)


def end_a_snapshot_one_number_early(patch: pytest.MonkeyPatch) -> None:
    real = event_feed.BlockSnapshot.chunk

    def chunk(self, index):
        batch = real(self, index)
        return dataclasses.replace(batch, sequence_number=batch.sequence_number - 1)

    patch.setattr(event_feed.BlockSnapshot, "chunk", chunk)


def go_on_with_the_chunk_of_one_that_was_parked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler.LayeredPrefill, "forget", lambda self, sequence: None)


def keep_a_chunk_that_is_half_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pass_plan.PrefillChunk, "is_through", property(lambda chunk: True))


def put_first_what_others_have_used_too(patch: pytest.MonkeyPatch) -> None:
    def own(self, ending):
        names = [name for session in ending.values() for name in session.ends]
        ends = [node for name in names if (node := self._tree.get(name)) is not None]
        return list(dict.fromkeys(above for end in ends for above in (end, *self._tree.ancestors(end))))

    patch.setattr(sessions.Sessions, "_own", own)


def give_a_child_what_it_uses_of_its_parents(patch: pytest.MonkeyPatch) -> None:
    real = sessions.Sessions.share

    def share(self, key, nodes):
        nodes = list(nodes)
        real(self, key, nodes)
        for node in nodes:
            if node.session is not None and node.session == self._top(key):
                node.session = key

    patch.setattr(sessions.Sessions, "share", share)


def end_the_session_of_another_tenant(patch: pytest.MonkeyPatch) -> None:
    real = sessions.Sessions.key_of
    patch.setattr(sessions.Sessions, "key_of", lambda self, tenant, name: real(self, Tenant(""), name))


def drop_the_checkpoint_that_a_prompt_resumes_from(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache.PrefixCache, "_resumed", lambda self, sequence, reached: None)


def adopt_the_archive_of_another_model(patch: pytest.MonkeyPatch) -> None:
    def believe(self, header):
        self._model = dataclasses.replace(self._model, fingerprint=header.fingerprint)

    patch.setattr(cache_transfer._Adoption, "_check_model", believe)


def adopt_for_another_tenant(patch: pytest.MonkeyPatch) -> None:
    real = cache_transfer._Adoption._command

    def command(self, *block):
        made = real(self, *block)
        return made and dataclasses.replace(made, tenant=Tenant("other"))

    patch.setattr(cache_transfer._Adoption, "_command", command)


def adopt_what_was_altered(patch: pytest.MonkeyPatch) -> None:
    real = archive.ArchiveReader._read

    def read(self, kind, fields, *, whole):
        if archive.DIGEST_NAME in fields:
            digest = self._file.hexdigest() if kind is archive._Kind.BLOCK_END else whole
            fields = {**fields, archive.DIGEST_NAME: digest}
        return real(self, kind, fields, whole=whole)

    patch.setattr(archive.ArchiveReader, "_read", read)
    checked = region_input.RegionInput.finish

    def finish(self):
        if not isinstance(self._files, block_bytes._FileInMemory):
            checked(self)

    patch.setattr(region_input.RegionInput, "finish", finish)


def trust_what_the_store_sends(patch: pytest.MonkeyPatch) -> None:
    """Check only the heads of fetched blocks: a load then finds a wrong byte in a block called sound."""

    def sound(self, path, name):
        with opened(Files(), path) as descriptor:
            return block_file.read_head(Files(), descriptor)

    patch.setattr(fetcher.BlockFolder, "sound", sound)


def adopt_what_is_fetched_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    real = fetcher.FetchedFile.finish

    def finish(self):
        with _without(self, "_files", "fsync"):
            real(self)

    patch.setattr(fetcher.FetchedFile, "finish", finish)


def wait_for_a_store_that_does_not_answer(patch: pytest.MonkeyPatch) -> None:
    async def wait_for(work, timeout):
        return await work

    async def wait(tasks, **how):
        return await asyncio.wait(tasks)

    untouched = ("create_task", "ensure_future", "gather", "shield", "Semaphore", "Task")
    blind = {name: getattr(asyncio, name) for name in untouched}
    blind |= {"wait_for": wait_for, "wait": wait, "timeout": lambda s: contextlib.AsyncExitStack()}
    patch.setattr(fetcher, "asyncio", types.SimpleNamespace(**blind))


def leave_in_the_store_what_is_ordered_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(uploader.Uploader, "delete", lambda self, names: None)


def keep_what_came_in_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetcher, "remove", lambda files, path: None)


BREAKS: list[Break] = [
    believe_every_token_equal,
    forget_windows,
    measure_windows_one_block_short,
    resume_between_checkpoints,
    take_the_kv_of_another_block,
    restore_one_block_off,
    forget_the_tenant,
    forget_the_adapter,
    start_from_anybody,
    forget_which_image,
    keep_no_image_in_files,
    begin_every_image_at_its_start,
    name_no_image_in_events,
    cut_images_anywhere,
    trust_every_region,
    check_planes_after_compression,
    trust_planes_that_decode_wrongly,
    unlink_before_the_row,
    never_sync_the_file,
    never_sync_the_folder,
    never_sync_the_folder_of_a_new_name,
    adopt_without_a_sync,
    leak_a_pin,
    evict_what_is_pinned,
    end_pins_early,
    evict_nothing_from_ram,
    ignore_the_size_limit,
    count_what_is_being_written_as_safe,
    leak_write_credit,
    count_what_is_queued_as_persisted,
    keep_evicted_blocks_in_the_index,
    let_failed_loads_wait,
    end_twice,
    forget_the_tokens_of_a_stop,
    lose_the_place_of_a_cancelled_prompt,
    hit_the_last_token,
    log_no_removal,
    lose_what_a_full_log_cannot_take,
    end_a_snapshot_one_number_early,
    go_on_with_the_chunk_of_one_that_was_parked,
    keep_a_chunk_that_is_half_through,
    put_first_what_others_have_used_too,
    give_a_child_what_it_uses_of_its_parents,
    end_the_session_of_another_tenant,
    drop_the_checkpoint_that_a_prompt_resumes_from,
    adopt_the_archive_of_another_model,
    adopt_for_another_tenant,
    adopt_what_was_altered,
    trust_what_the_store_sends,
    adopt_what_is_fetched_without_a_sync,
    wait_for_a_store_that_does_not_answer,
    leave_in_the_store_what_is_ordered_away,
    keep_what_came_in_part,
]


FIRST_SEEDS: dict[Break, int] = {
    take_the_kv_of_another_block: 17,
    believe_every_token_equal: 19,
    trust_every_region: 95,
    go_on_with_the_chunk_of_one_that_was_parked: 220,
    check_planes_after_compression: PLANES_SEED,
    trust_planes_that_decode_wrongly: PLANES_SEED,
    adopt_without_a_sync: NAMES_SEED + 20,
    leak_a_pin: 30,
    evict_what_is_pinned: 278,
    end_pins_early: PIECES_SEED + 20,
    put_first_what_others_have_used_too: 11,
    give_a_child_what_it_uses_of_its_parents: 33,
    unlink_before_the_row: 74,
    ignore_the_size_limit: 54,
    forget_which_image: IMAGES_SEED + 30,
    keep_no_image_in_files: IMAGES_SEED + 15,
    begin_every_image_at_its_start: IMAGES_SEED,
    name_no_image_in_events: IMAGES_SEED + 14,
    cut_images_anywhere: IMAGES_SEED,
    adopt_the_archive_of_another_model: ARCHIVES_SEED + 15,
    adopt_for_another_tenant: ARCHIVES_SEED + 15,
    adopt_what_was_altered: ARCHIVES_SEED + 19,
    trust_what_the_store_sends: SHARED_SEED + 5,
    adopt_what_is_fetched_without_a_sync: SHARED_SEED + 23,
    wait_for_a_store_that_does_not_answer: SHARED_SEED,
    leave_in_the_store_what_is_ordered_away: SHARED_SEED + 13,
    keep_what_came_in_part: SHARED_SEED + 23,
    forget_the_tenant: 2,
    start_from_anybody: 6,
    count_what_is_being_written_as_safe: 24,
    lose_the_place_of_a_cancelled_prompt: 6,
    hit_the_last_token: 6,
    lose_what_a_full_log_cannot_take: 4,
    drop_the_checkpoint_that_a_prompt_resumes_from: 6,
}
"""Where the search begins, at a story that notices soon: each takes 0.1 s, with some breaks a second."""


@pytest.mark.skipif("ICEHOUSE_SIM_SEED" in os.environ, reason="one story was asked for")
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda break_it: break_it.__name__)
def test_some_story_notices(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    first = FIRST_SEEDS.get(break_it, 0)
    with pytest.raises(SimulationFailed, match="play it again with ICEHOUSE_SIM_SEED=") as found:
        play(range(first, first + _SEED_LIMIT))
    assert not isinstance(found.value.__cause__, TypeError | AttributeError), "the break itself is broken"
