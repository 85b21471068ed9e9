"""Pages on a CPU: rows restored from blocks in RAM are the rows that computed them, and share their pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.blocks import BlockHeader, RegionKind
from icehouse_server.domain.ids import BlockHash, Fingerprint, SequenceId
from icehouse_server.domain.request import LogprobsWanted
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import Chunk, DecodeRow, Drawn
from icehouse_server.engine.kv.page_groups import PAGE_TOKEN_COUNT
from icehouse_server.engine.kv.paged_cache import PagedCache, table_of
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock, RestoreInput
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner import runner as runner_module
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.storage.api import PlannedBlock

from tests.fixtures.engine import load_at_once, with_kernels
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
BLOCK = 256
PROMPT = [3 + j * 7 % 290 for j in range(3 * BLOCK)]
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
COLD, HIT = SequenceId(1), SequenceId(2)

pytestmark = pytest.mark.skipif(not ON_CPU, reason="other devices have other pages")


def runner_of(folder: Path, **settings: Any) -> ModelRunner:
    source = model_loader.ModelSource(path=folder, model_id="tiny")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(is_pipelined=False, kv_group_size=32, **settings),
        clock=SystemClock(),
    )
    load_at_once(runner)
    return runner


def prefill(runner: ModelRunner) -> tuple[PlacedBlock, ...]:
    """Compute the prompt's blocks, keep them, and let the row go on."""
    runner.open(COLD)
    blocks = []
    for start in range(0, len(PROMPT), BLOCK):
        stop = start + BLOCK
        runner.run([Chunk(COLD, PROMPT[start:stop])])
        kept = runner.blocks.cut(COLD, start=start, stop=stop, kinds=[RegionKind.KV])
        blocks.append(PlacedBlock(start, BLOCK, kept))
    return tuple(blocks)


def restore(runner: ModelRunner, name: SequenceId, blocks: Sequence[PlacedBlock]) -> None:
    runner.blocks.begin_restore(name, RestoreInput(tuple(blocks), BLOCK * len(blocks)))
    assert runner.blocks.continue_restore(name, budget_s=BOUND_S)


def decode(runner: ModelRunner, name: SequenceId) -> list[Drawn]:
    row = DecodeRow(SamplingParams(), prompt_token_ids=tuple(PROMPT), logprobs=LogprobsWanted(top_count=3))
    found = list(runner.run([Chunk(name, [12], row=row)]).drawn)
    for _ in range(6):
        found += runner.run([]).drawn
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_from_ram_is_bit_for_bit_the_one_that_computed_it(tmp_path: Path, dtype: str) -> None:
    runner = runner_of(tiny_model_dir(tmp_path, "llama", dtype=dtype, **WIDE), attention=Attention.AUTO)
    blocks = prefill(runner)
    cold = decode(runner, COLD)
    held = [cache.tokens().tensors for cache in runner.caches(COLD)]
    mx.eval(held)
    runner.release([COLD])
    restore(runner, HIT, blocks)
    hit = decode(runner, HIT)
    assert [(each.token_id, each.logprobs) for each in hit] == [
        (each.token_id, each.logprobs) for each in cold
    ]
    again = [cache.tokens().tensors for cache in runner.caches(HIT)]
    for before, after in zip(held, again, strict=True):
        for (_, wanted), (_, array) in zip(before, after, strict=True):
            assert mx.array_equal(array, wanted).item()


def test_rows_from_ram_share_the_pages_of_the_blocks(tmp_path: Path) -> None:
    runner = runner_of(tiny_model_dir(tmp_path, "llama", **WIDE), attention=Attention.AUTO)
    blocks = prefill(runner)
    names = [SequenceId(number) for number in (2, 3, 4)]
    for name in names:
        restore(runner, name, blocks)
    tables = [table_of(runner.caches(name)).runs[0] for name in (COLD, *names)]
    assert all(each.numbers == tables[0].numbers for each in tables)
    assert len(tables[0].numbers) == len(PROMPT) // PAGE_TOKEN_COUNT


@pytest.mark.parametrize(
    ("attention", "is_proved", "architecture", "are_paged"),
    [
        (Attention.AUTO, True, "llama", True),
        (Attention.AUTO, False, "llama", False),
        (Attention.AUTO, True, "deepseek_v3", False),
        (Attention.ROWS, True, "llama", False),
    ],
)
def test_who_has_pages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: Attention,
    is_proved: bool,
    architecture: str,
    are_paged: bool,
) -> None:
    if not is_proved:
        monkeypatch.setattr(runner_module, "kernels_for", with_kernels(None))
    runner = runner_of(tiny_model_dir(tmp_path, architecture), attention=attention)
    runner.open(COLD)
    runner.run([Chunk(COLD, PROMPT[:5])])
    caches = runner.caches(COLD)
    assert [isinstance(cache, PagedCache) for cache in caches] == [are_paged] * len(caches)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_from_ssd_has_the_pages_that_were_read_into(tmp_path: Path, dtype: str) -> None:
    """And so have the blocks that RAM keeps of it: each byte is written once."""
    runner = runner_of(tiny_model_dir(tmp_path, "llama", dtype=dtype, **WIDE))
    blocks = prefill(runner)
    files = [runner.blocks.begin_to_host(list(block.regions.values())).take()[0] for block in blocks]
    planned = [PlannedBlock(header_at(block.start_token_index), frozenset(block.regions)) for block in blocks]
    place = runner.blocks.begin_load(planned)
    assert place is not None
    for block, file in zip(blocks, files, strict=True):
        shapes = [Shape(t.name, t.dtype, t.shape, t.data.nbytes) for t in file.tensors]
        views = place.segments(shapes, start_token_index=block.start_token_index, token_count=BLOCK)
        content = memoryview(b"".join(bytes(tensor.data) for tensor in file.tensors))
        for view in views:
            view[:], content = content[: view.nbytes], content[view.nbytes :]
    found = runner.blocks.end_load(place)
    cold = decode(runner, COLD)
    cold_numbers = table_of(runner.caches(COLD)).runs[0].numbers
    runner.release([COLD])
    restore(
        runner,
        HIT,
        [
            PlacedBlock(b.start_token_index, BLOCK, {RegionKind.KV: kv})
            for b, kv in zip(blocks, found, strict=True)
        ],
    )
    numbers = table_of(runner.caches(HIT)).runs[0].numbers
    assert numbers == [page.number for region in found for page in region.pages]
    assert not set(numbers) & set(cold_numbers)
    hit = decode(runner, HIT)
    assert [(each.token_id, each.logprobs) for each in hit] == [
        (each.token_id, each.logprobs) for each in cold
    ]


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def header_at(start: int) -> BlockHeader:
    return BlockHeader(
        hash=BlockHash(bytes([start // BLOCK]) * 32),
        parent=BlockHash(bytes(32)),
        fingerprint=Fingerprint("1" * 64),
        start_token_index=start,
        token_ids=tuple(PROMPT[start : start + BLOCK]),
        block_token_limit=BLOCK,
    )
