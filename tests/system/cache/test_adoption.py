"""Blocks read out of one cache and adopted by another: limits, refusals, full disks, crashes."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import RegionKind, TokenKeys
from icehouse_server.domain.cache_commands import (
    AdoptBlock,
    AdoptionRefusal,
    BeginImport,
    BlockAdoption,
    BlockContent,
    ExportBlocks,
    ImportTerms,
    ListExport,
    ReadBlock,
)
from icehouse_server.domain.ids import (
    DEFAULT_TENANT,
    AdapterDigest,
    AdapterName,
    BlockHash,
    CacheScope,
    Tenant,
)
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import QuotaLimits
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason
from icehouse_server.storage.api import StorageFailed

from tests.fixtures.storage.faults import Crash, CrashingFiles, FaultyFiles
from tests.system.cache.stepped_server import BLOCK, HYBRID, SteppedServer, prompt

TOKENS = prompt(4 * BLOCK + 3)
A, B = Tenant("a"), Tenant("b")


def read_all(
    served: SteppedServer, keys: TokenKeys | None = None, *, tenant: Tenant = DEFAULT_TENANT
) -> list[AdoptBlock]:
    """Return the orders that adopt what a server has, for the same tenant."""
    listed = served.order(ListExport(keys, CacheScope(tenant)))
    assert isinstance(listed, ExportBlocks) and listed.block_token_limit == BLOCK
    orders = []
    for block in listed.blocks:
        content = served.order(ReadBlock(block.hash))
        assert isinstance(content, BlockContent), content
        header = content.block.header
        assert header.hash == block.hash and header.parent == block.parent
        orders.append(
            AdoptBlock(
                tenant,
                block.adapter,
                block.parent if block.start_token_index else None,
                block.start_token_index,
                header.token_ids,
                content.block.regions,
            )
        )
    return orders


def filled(directory: Path, **how: object) -> list[AdoptBlock]:
    with SteppedServer(directory, **how) as served:
        served.ask("a", TOKENS, max_output_tokens=0)
        return read_all(served)


def adopt(served: SteppedServer, order: AdoptBlock) -> BlockAdoption:
    answer = served.order(order)
    assert isinstance(answer, BlockAdoption), answer
    served.check()
    return answer


def test_what_one_cache_has_another_reuses(tmp_path: Path) -> None:
    orders = filled(tmp_path / "a")
    assert [order.start_token_index for order in orders] == [n * BLOCK for n in range(5)]
    with SteppedServer(tmp_path / "b") as served:
        terms = served.order(BeginImport())
        assert isinstance(terms, ImportTerms) and terms.block_token_limit == BLOCK
        for order in orders:
            answer = adopt(served, order)
            assert (answer.is_new, answer.refusal) == (True, None)
            assert (adopt(served, order).is_new, adopt(served, order).hash) == (False, answer.hash)
        assert served.stats().ram.block_count == 0
        assert served.ask("b", TOKENS).cache.ssd_token_count == 4 * BLOCK + 2
    with SteppedServer(tmp_path / "b") as served:
        assert served.ask("b", TOKENS).cache.ssd_token_count == 4 * BLOCK + 2


def test_blocks_are_read_in_ram_on_ssd_and_on_their_way_there(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("a", TOKENS, max_output_tokens=0)
        listed = served.order(ListExport(None))
        assert isinstance(listed, ExportBlocks) and served.stats().ssd.block_count == 0
        first = listed.blocks[0].hash
        served.holds_storage = True
        node = served.cache.tree.get(first)
        assert node is not None and served.cache.spills.send(node, request_id=None)
        answers = served.give(ReadBlock(first))
        served.loop.step()
        assert answers == []
        served.holds_storage = False
        served.step_until_idle()
        assert isinstance(answers[0], BlockContent)
        assert len(read_all(served)) == 5
    with SteppedServer(tmp_path) as served:
        # Their tokens are read too: this process never saw them.
        assert len(read_all(served, tuple(TOKENS))) == 5
        assert isinstance(served.order(ReadBlock(BlockHash(b"x" * 32))), NotFound)


def test_a_full_write_queue_is_waited_for(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_queue_limit_bytes=70_000) as served:
        served.ask("a", TOKENS, max_output_tokens=0)
        served.holds_storage = True
        listed = [node.hash for node in served.cache.tree]
        node = served.cache.tree.get(listed[0])
        assert node is not None and served.cache.spills.send(node, request_id=None)
        answers = served.give(ReadBlock(listed[1]))
        served.loop.step()
        served.holds_storage = False
        served.step_until_idle()
        assert isinstance(answers[0], BlockContent)


def test_a_tenant_gets_its_own_blocks_and_those_of_its_adapters(tmp_path: Path) -> None:
    french = AdapterName("french")
    adapters = {french: AdapterDigest(b"\x05" * 32)}
    with SteppedServer(tmp_path / "a", adapters=adapters) as served:
        served.ask("a", TOKENS, tenant=A, max_output_tokens=0)
        served.ask("f", TOKENS, tenant=A, adapter=french, max_output_tokens=0)
        served.ask("b", prompt(2 * BLOCK, salt=1), tenant=B, max_output_tokens=0)
        orders = read_all(served, tenant=A)
        assert {order.adapter for order in orders} == {None, adapters[french]} and len(orders) == 10
        assert len(read_all(served, tenant=B)) == 2
        assert read_all(served, tenant=Tenant("c")) == []
    with SteppedServer(tmp_path / "b") as served:
        adapted = next(order for order in orders if order.adapter)
        assert adopt(served, adapted).refusal is AdoptionRefusal.SCOPE
        assert adopt(served, next(order for order in orders if not order.adapter)).is_new
        # The other tenant has nothing of it.
        assert served.ask("b", TOKENS, tenant=B).cache.cached_token_count == 0


def test_a_block_out_of_place_or_of_another_make_is_refused(tmp_path: Path) -> None:
    first, second, *_ = orders = filled(tmp_path / "a")
    with SteppedServer(tmp_path / "b") as served:
        change = dataclasses.replace
        renamed = tuple(
            change(region, tensors=tuple(change(t, name="other") for t in region.tensors))
            for region in first.regions
        )
        for order, refusal in (
            (second, AdoptionRefusal.PARENT_MISSING),
            (change(first, start_token_index=BLOCK), AdoptionRefusal.PARENT_MISSING),
            (change(first, start_token_index=3), AdoptionRefusal.PARENT_MISSING),
            (change(first, keys=first.keys * 2), AdoptionRefusal.DAMAGED),
            (change(first, keys=()), AdoptionRefusal.DAMAGED),
            (change(first, regions=renamed), AdoptionRefusal.LAYOUT),
        ):
            assert adopt(served, order).refusal is refusal
        assert adopt(served, first).is_new
        assert adopt(served, change(second, start_token_index=2 * BLOCK)).refusal is (
            AdoptionRefusal.PARENT_MISSING
        )
        # A parent of another tenant's is none.
        assert adopt(served, change(second, tenant=B)).refusal is AdoptionRefusal.PARENT_MISSING
        assert adopt(served, second).is_new and len(orders) == 5


def test_a_full_quota_or_tier_refuses_and_evicts_nothing(tmp_path: Path) -> None:
    orders = filled(tmp_path / "a")
    with SteppedServer(tmp_path / "b", quotas=QuotaLimits(ssd_bytes=67_500)) as served:
        answers = [adopt(served, order) for order in orders]
        assert answers[0].is_new and AdoptionRefusal.QUOTA in {answer.refusal for answer in answers}
        assert served.cache.tree.ssd.used_bytes <= 67_500
        assert served.stats().ssd.evicted_block_total == served.stats().ssd.purged_block_total == 0


def test_a_write_queue_that_others_have_filled_is_no_full_ssd(tmp_path: Path) -> None:
    orders = filled(tmp_path / "a")
    with SteppedServer(tmp_path / "b") as served:
        queue = served.storage._state.spill_queue
        others_bytes = queue.free
        assert queue.try_reserve(others_bytes)
        answer = served.order(orders[0])
        assert isinstance(answer, Overloaded) and answer.reason is Reason.QUEUE_FULL
        assert "queue" in answer.message
        queue.release(others_bytes)
        assert adopt(served, orders[0]).is_new


def test_a_block_that_the_write_queue_never_takes_is_refused(tmp_path: Path) -> None:
    orders = filled(tmp_path / "a")
    with SteppedServer(tmp_path / "b", spill_queue_limit_bytes=1000) as served:
        assert adopt(served, orders[0]).refusal is AdoptionRefusal.SSD_FULL


@pytest.mark.parametrize("verb", ["create", "write", "fsync", "rename"])
def test_a_full_disk_in_the_middle_refuses_the_rest_and_leaves_nothing(tmp_path: Path, verb: str) -> None:
    orders = filled(tmp_path / "a")
    # Evicting helps only where there is something: the second try fails as well.
    files = FaultyFiles(verb, 3 if verb == "write" else 2, errno.ENOSPC, times=100)
    with SteppedServer(tmp_path / "b", files=files) as served:
        files.is_armed = True
        answers = [adopt(served, order) for order in orders]
        files.is_armed = False
        assert answers[0].is_new and answers[1].refusal is AdoptionRefusal.SSD_FULL
        assert {answer.is_new for answer in answers[1:]} == {False}
    assert not list((tmp_path / "b").rglob("*.partial"))
    with SteppedServer(tmp_path / "b") as served:
        served.ask("b", TOKENS)


def test_a_crash_at_any_step_leaves_whole_blocks_and_no_garbage(tmp_path: Path) -> None:
    orders = filled(tmp_path / "a")[:3]
    step, counts = 0, set[int]()
    while True:
        step += 1
        directory = tmp_path / f"b{step}"
        files = CrashingFiles(step, is_kill=True)
        served = SteppedServer(directory, files=files)
        try:
            with served:
                files.is_armed = True
                for order in orders:
                    adopt(served, order)
                files.is_armed = False
        except Crash:
            with SteppedServer(directory) as again:
                cached = again.ask("b", TOKENS).cache.ssd_token_count
                counts.add(cached)
                assert cached in [count * BLOCK for count in range(4)], step
                assert not list(directory.rglob("*.partial"))
        else:
            break
    assert counts == {0, BLOCK, 2 * BLOCK, 3 * BLOCK}


def test_blocks_with_states_are_read_whole(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, facts=HYBRID) as served:
        served.ask("a", TOKENS, max_output_tokens=0)
        orders = read_all(served)
        assert any(region.kind is RegionKind.CHECKPOINT for order in orders for region in order.regions)


def test_without_a_tier_that_writes_there_is_nothing_to_move(tmp_path: Path) -> None:
    with SteppedServer(None) as served:
        answer = served.order(ListExport(None))
        assert isinstance(answer, IcehouseError) and answer.reason is Reason.CACHE_UNSUPPORTED
    with SteppedServer(tmp_path, spill_policy="off") as served:
        answer = served.order(BeginImport())
        assert isinstance(answer, IcehouseError) and answer.reason is Reason.CACHE_UNSUPPORTED


def test_a_tier_that_dies_meanwhile_answers_with_a_refusal(tmp_path: Path) -> None:
    orders = filled(tmp_path / "a")
    with SteppedServer(tmp_path / "b") as served:
        served.ask("b", prompt(2 * BLOCK, salt=3), max_output_tokens=0)
        served.holds_storage = True
        adopting = served.give(orders[0])
        reading = served.give(ReadBlock(next(iter(served.cache.tree)).hash))
        served.loop.step()
        served.is_storage_alive = False
        served.mailbox.post(StorageFailed("a test"))
        served.step_until_idle()
        assert isinstance(adopting[0], BlockAdoption) and adopting[0].refusal is AdoptionRefusal.SSD_FULL
        assert isinstance(reading[0], Overloaded)
        served.check()
