"""Blocks read from SSD into pages: every byte where it belongs, and no page another's while it is read."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.device import Backend
from icehouse_server.domain.blocks import BlockHeader, RegionKind
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.port import PagedAttention, PoolShape
from icehouse_server.engine.kv import pool as kv_pool
from icehouse_server.engine.kv.page_table import PageGroup, PageRun, places_of
from icehouse_server.engine.kv.pool import PagePool, PassClock
from icehouse_server.engine.kv.runner_blocks import PageDestination
from icehouse_server.storage.api import LayoutMismatch, PlannedBlock

BLOCK = 16
NAMES = ("000.k", "000.v", "001.k", "001.v")
ON_CPU = mx.default_device() == mx.Device(mx.cpu)

pytestmark = pytest.mark.skipif(not ON_CPU, reason="other devices have other kernels")


@dataclasses.dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def group_of(
    attention: PagedAttention | None = None,
    *,
    page_token_count: int = 4,
    dtype: mx.Dtype = mx.float32,
    page_count: int = 0,
) -> PageGroup:
    shape = PoolShape(2, 3, 8, page_token_count, dtype)
    pool = PagePool(shape, passes=PassClock(), size_bytes=page_count * shape.page_bytes)
    return PageGroup(pool, attention or CpuAttention(), {0: 0, 1: 1})


def planned(*token_counts: int) -> list[PlannedBlock]:
    blocks = []
    for index, count in enumerate(token_counts):
        header = BlockHeader(
            hash=BlockHash(bytes([index]) * 32),
            parent=BlockHash(bytes(32)),
            fingerprint=Fingerprint("1" * 64),
            start_token_index=index * BLOCK,
            token_ids=tuple(range(count)),
            block_token_limit=BLOCK,
        )
        blocks.append(PlannedBlock(header, frozenset({RegionKind.KV})))
    return blocks


def place_for(group: PageGroup, *token_counts: int) -> PageDestination:
    pages = group.pool.take_spare(sum(map(group.pool.pages_for, token_counts)))
    assert pages is not None
    return PageDestination(group, NAMES, planned(*token_counts), pages)


def tensors_of(group: PageGroup, token_count: int) -> list[Tensor]:
    shape = group.pool.shape
    size = shape.kv_head_count * token_count * shape.head_size * shape.dtype.size
    told = {mx.float32: "F32", mx.bfloat16: "BF16"}[shape.dtype]
    return [
        Tensor(name, told, (1, shape.kv_head_count, token_count, shape.head_size), size) for name in NAMES
    ]


def content_of(group: PageGroup, token_count: int, *, seed: int) -> bytes:
    """Return a block's kv as its file has it."""
    tensors = tensors_of(group, token_count)
    shape = [len(tensors), *tensors[0].shape[1:]]
    return bytes(
        memoryview(
            mx.random.normal(shape, key=mx.random.key(seed)).astype(group.pool.shape.dtype).view(mx.uint8)
        )
    )


def views_of(group: PageGroup, place: PageDestination, index: int, token_count: int) -> list[memoryview]:
    return place.segments(
        tensors_of(group, token_count), start_token_index=index * BLOCK, token_count=token_count
    )


def fill(views: Sequence[memoryview], content: bytes) -> None:
    """Write a file's bytes into the views in turn, as a reader does."""
    begin = 0
    for view in views:
        view[:] = content[begin : begin + view.nbytes]
        begin += view.nbytes
    assert begin == len(content)


def read(group: PageGroup, place: PageDestination, *token_counts: int) -> list[bytes]:
    """Fill all blocks; return what each of them holds then, as its file would have it."""
    contents = [content_of(group, count, seed=index) for index, count in enumerate(token_counts)]
    for index, (count, content) in enumerate(zip(token_counts, contents, strict=True)):
        fill(views_of(group, place, index, count), content)
    return contents


def held(group: PageGroup, place: PageDestination) -> list[bytes]:
    found = []
    for region in place.regions(group):
        copied = region.copied_out(group, NAMES)
        mx.eval(copied.buffers)
        found.append(b"".join(bytes(memoryview(array.view(mx.uint8))) for _, array in copied.arrays))
        if (memory := group.pool.memory()) is not None:
            on_host = region.copied_to_host(group, NAMES, memory)
            assert [tensor.name for tensor in on_host.tensors] == list(NAMES)
            assert b"".join(tensor.data for tensor in on_host.tensors) == found[-1]
    return found


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("page_token_count", [4, 16])
@pytest.mark.parametrize("attention", [CpuAttention, GatherAttention])
def test_what_is_read_is_the_block(
    attention: type[PagedAttention], page_token_count: int, dtype: mx.Dtype
) -> None:
    group = group_of(attention(), page_token_count=page_token_count, dtype=dtype)
    place = place_for(group, BLOCK, BLOCK, 7)
    contents = read(group, place, BLOCK, BLOCK, 7)
    assert held(group, place) == contents


def test_where_the_device_has_memory_of_its_own_all_pages_are_filled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_pool, "find_backend", lambda: Backend.CUDA)
    group = group_of()
    fills: list[int] = []
    really = group.attention.fill_pages
    monkeypatch.setattr(
        group.attention,
        "fill_pages",
        lambda pool, content, pages: (fills.append(len(pages)), really(pool, content, pages)),
    )
    place = place_for(group, BLOCK, BLOCK, 7)
    contents = read(group, place, BLOCK, BLOCK, 7)
    assert held(group, place) == contents and fills == [4 + 4 + 2]


def test_nothing_is_copied_of_what_is_read_into_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of()
    place = place_for(group, BLOCK)
    (content,) = read(group, place, BLOCK)
    monkeypatch.setattr(group.attention, "fill_pages", None)
    assert held(group, place) == [content]


def test_a_block_that_is_one_page_is_read_in_one_piece() -> None:
    group = group_of(page_token_count=BLOCK)
    place = place_for(group, BLOCK)
    (view,) = views_of(group, place, 0, BLOCK)
    assert view.nbytes == group.pool.shape.page_bytes


def test_blocks_of_another_layout_are_refused() -> None:
    group = group_of()
    place = place_for(group, BLOCK)
    right = tensors_of(group, BLOCK)
    wrong = [
        right[:-1],
        [dataclasses.replace(each, dtype="F16") for each in right],
        [dataclasses.replace(each, shape=(1, 3, BLOCK, 9)) for each in right],
        [right[1], right[0], *right[2:]],
        tensors_of(group, BLOCK - 1),
    ]
    for tensors in wrong:
        with pytest.raises(LayoutMismatch, match="pages hold 4 of F32"):
            place.segments(tensors, start_token_index=0, token_count=BLOCK)


def test_a_read_that_nobody_waits_for_any_more_keeps_its_pages_until_it_returns() -> None:
    """A disk may hang for minutes, and the system write then."""
    group = group_of(page_count=20)
    place = place_for(group, BLOCK)
    views = views_of(group, place, 0, BLOCK)
    late = views[-1]
    del place, views
    gc.collect()
    others = group.pool.take_spare(16)
    assert others is not None and group.pool.take_spare(1) is None
    before = np.array(group.pool.array[mx.array([page.number for page in others])])
    late[:] = bytes([0xAB]) * late.nbytes
    after = np.array(group.pool.array[mx.array([page.number for page in others])])
    assert before.tobytes() == after.tobytes()
    del late
    gc.collect()
    assert len(group.pool.take_spare(4) or ()) == 4


@pytest.mark.parametrize("is_late", [False, True])
def test_a_pool_that_grows_beside_a_read_loses_nothing_of_it(is_late: bool) -> None:
    """Readers go on in the old array."""
    group = group_of()
    place = place_for(group, BLOCK, BLOCK)
    contents = [content_of(group, BLOCK, seed=seed) for seed in (0, 1)]
    views = [views_of(group, place, index, BLOCK) for index in (0, 1)]
    fill(views[0], contents[0])
    if not is_late:
        fill(views[1], contents[1])
    array = group.pool.array
    rows = group.pool.take(group.pool.page_count)
    assert group.pool.array is not array
    if is_late:
        fill(views[1], contents[1])
    assert held(group, place) == contents
    assert not {page.number for page in rows} & {
        page.number for region in place.regions(group) for page in region.pages
    }


def test_what_a_row_wrote_last_does_not_come_over_what_is_read_after_it() -> None:
    """A CPU's attention puts keys and values into the pool when the next pass asks for it."""
    group = group_of(page_count=16)
    run = PageRun(group)
    run.make_room(16 * 4)
    keys = mx.ones((4, 3, 1, 8))
    for layer in range(2):
        group.attention.write(group.pool, keys, keys, places_of([run], [60], [4]), layer=layer)
    del run
    gc.collect()
    place = place_for(group, BLOCK, BLOCK, BLOCK, BLOCK)
    contents = read(group, place, *[BLOCK] * 4)
    assert held(group, place) == contents
