"""The capacity page's formula against the caches of real architectures: memory, windows, blocks on SSD."""

from __future__ import annotations

import pytest
from icehouse_server.domain.blocks import RegionKind
from mlx_lm.models.cache import QuantizedKVCache

from docs import capacity
from tests.fixtures.models import ARCHITECTURES, tiny_config
from tests.unit.engine.kv_cache.runs import BLOCK, Recording, model_of, prompt

FLOAT32_BYTES = 4
# Llama 4 with images describes its text model in a nested config, and its chunks are windows of a kind.
PLAIN = [name for name in ARCHITECTURES if name != "llama4"]


@pytest.mark.parametrize("architecture", PLAIN)
def test_the_formula_is_what_the_server_measures(architecture: str) -> None:
    config = tiny_config(architecture)
    if architecture == "lfm2":
        # The tiny config gives every model a head size; this one has none, and the code does not ask for it.
        del config["head_dim"]
    recording = Recording(model_of(architecture), prompt(2 * BLOCK))
    layout, caches = recording.layout, recording.caches
    assert layout.kv_bytes_per_token(caches) == capacity.kv_bytes_per_token(config, value_bytes=FLOAT32_BYTES)
    assert layout.facts.window_token_count == capacity.Layers.of(config).window_token_count
    cut = layout.cut_tokens(RegionKind.KV, caches, start=BLOCK, stop=2 * BLOCK).size_bytes
    cut += layout.cut_tokens(RegionKind.WINDOW, caches, start=BLOCK, stop=2 * BLOCK).size_bytes
    assert cut == capacity.block_bytes(config, value_bytes=FLOAT32_BYTES, block_token_count=BLOCK)


def test_windows_are_counted_when_they_are_full() -> None:
    config = tiny_config("gemma3_text")
    recording = Recording(model_of("gemma3_text"), prompt(4 * BLOCK))
    window = config["sliding_window"]
    region = recording.layout.cut_tokens(
        RegionKind.WINDOW, recording.caches, start=4 * BLOCK - window, stop=4 * BLOCK
    )
    assert region.kind is RegionKind.WINDOW
    assert region.size_bytes == capacity.window_bytes(config, value_bytes=FLOAT32_BYTES) > 0


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_kv_is_counted_with_its_scales(bits: int) -> None:
    model = model_of("llama")
    recording = Recording(
        model,
        prompt(2 * BLOCK),
        make_caches=lambda: [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers],
    )
    value_bytes = capacity.quantized_value_bytes(bits=bits, group_size=32, scale_bytes=FLOAT32_BYTES)
    expected = capacity.kv_bytes_per_token(tiny_config("llama"), value_bytes=value_bytes)
    assert recording.layout.kv_bytes_per_token(recording.caches) == expected
