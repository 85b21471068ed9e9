"""Cold, from RAM, and from SSD after a restart: the same tokens, for every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.storage.storage_settings import Codec

from tests.fixtures.models import ARCHITECTURES, tiny_model_dir
from tests.system.cache.server import BLOCK, CacheServer


def prompt(count: int, *, salt: int = 0) -> list[int]:
    return [3 + (i * 7 + i * i + salt) % 290 for i in range(count)]


WAYS = {
    "rows": (Attention.ROWS, False),
    "rows ahead": (Attention.ROWS, True),
    "pages": (Attention.AUTO, False),
    "pages ahead": (Attention.AUTO, True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_cold_ram_and_ssd_give_the_same_tokens(tmp_path: Path, architecture: str, way: str) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    tokens = prompt(5 * BLOCK + 7)
    attention, is_pipelined = WAYS[way]
    with CacheServer(folder, tmp_path / "blocks", is_pipelined=is_pipelined, attention=attention) as served:
        cold = served.ask("cold", tokens)
        ram = served.ask("ram", tokens)
    with CacheServer(folder, tmp_path / "blocks", attention=attention) as served:
        ssd = served.ask("ssd", tokens)
        again = served.ask("again", tokens)
    assert cold.cache.cached_token_count == 0 and cold.cache.limit is ReuseLimit.NO_MATCH
    assert ram.tokens == cold.tokens and ssd.tokens == cold.tokens and again.tokens == cold.tokens
    assert ram.cache.ram_token_count == len(tokens) - 1 and ram.cache.ssd_token_count == 0
    assert ssd.cache.ssd_token_count == len(tokens) - 1 and ssd.cache.ram_token_count == 0
    # How many of its blocks are back in RAM depends on how long its few steps took.
    assert again.cache.cached_token_count == len(tokens) - 1


@pytest.mark.parametrize("kv_bits", [0, 8])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1"])
def test_blocks_in_byte_planes_give_the_same_tokens(tmp_path: Path, architecture: str, kv_bits: int) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    tokens = prompt(5 * BLOCK + 7)
    way = {"codec": Codec.PLANES, "kv_bits": kv_bits}
    with CacheServer(folder, tmp_path / "blocks", **way) as served:
        cold = served.ask("cold", tokens)
        ram = served.ask("ram", tokens)
    with CacheServer(folder, tmp_path / "blocks", **way) as served:
        ssd = served.ask("ssd", tokens)
        disk = served.stats()[1].disk
    assert ram.tokens == cold.tokens and ssd.tokens == cold.tokens
    assert ssd.cache.ssd_token_count == len(tokens) - 1
    assert disk is not None and disk.decompress_bytes_per_s > 0.0


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_next_turn_of_a_conversation_starts_where_the_last_one_ended(
    tmp_path: Path, architecture: str
) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    first = prompt(3 * BLOCK + 5)
    with CacheServer(folder, tmp_path / "blocks") as served:
        reply = served.ask("first", first, max_output_tokens=BLOCK + 3)
        second = [*first, *reply.tokens, *prompt(9, salt=50)]
        warm = served.ask("second", second)
    with CacheServer(folder, None, is_enabled=False) as served:
        cold = served.ask("second", second)
    with CacheServer(folder, tmp_path / "blocks") as served:
        restarted = served.ask("second", second)
    assert warm.tokens == cold.tokens and restarted.tokens == cold.tokens
    # The last token of a reply was told, and not fed to the model.
    assert warm.cache.cached_token_count == len(first) + len(reply.tokens) - 1
    assert restarted.cache.ssd_token_count > 0
