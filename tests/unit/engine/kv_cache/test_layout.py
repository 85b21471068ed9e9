"""What the layout says of each architecture, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import CacheUnsupported
from icehouse_server.engine.kv_cache.cache_layout import CacheLayout
from icehouse_server.errors import Reason
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from tests.fixtures.models import ARCHITECTURES
from tests.unit.engine.kv_cache.runs import BLOCK, Recording, model_of, prompt

FACTS: dict[str, tuple[tuple[str, ...], bool, int, bool]] = {
    # class names, needs_checkpoint, window, cuttable inside a block
    "llama": (("KVCache",), False, 0, True),
    "qwen3": (("KVCache",), False, 0, True),
    "gemma3_text": (("RotatingKVCache", "KVCache"), False, 24, True),
    "gpt_oss": (("RotatingKVCache", "KVCache"), False, 24, True),
    "llama4_text": (("KVCache",), False, 0, True),
    "llama4": (("ChunkedKVCache", "KVCache"), False, 32, True),
    "qwen3_next": (("ArraysCache", "KVCache"), True, 0, False),
    "lfm2": (("ArraysCache", "KVCache"), True, 0, False),
    "mamba2": (("ArraysCache",), True, 0, False),
    "falcon_h1": (("ArraysCache", "KVCache"), True, 0, False),
    "deepseek_v3": (("KVCache",), False, 0, True),
}


class Subclassed(KVCache):
    """Whatever it changes, it is not KVCache any more."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_facts(architecture: str) -> None:
    layout = CacheLayout.of(make_prompt_cache(model_of(architecture)), block_token_count=BLOCK)
    facts = layout.facts
    assert (
        tuple(dict.fromkeys(part.cache_class.name for part in layout.parts)),
        facts.needs_checkpoint,
        facts.window_token_count,
        facts.cuttable_inside,
    ) == FACTS[architecture]


def test_a_window_shorter_than_a_block_cannot_be_matched_inside() -> None:
    facts = CacheLayout.of([RotatingKVCache(8), KVCache()], block_token_count=BLOCK).facts
    assert not facts.cuttable_inside and not facts.needs_checkpoint


def test_names_say_layer_and_part() -> None:
    recording = Recording(model_of("falcon_h1"), prompt(BLOCK))
    names = [
        name
        for name, _ in recording.layout.cut_tokens(
            RegionKind.KV, recording.caches, start=0, stop=BLOCK
        ).arrays
    ]
    assert names[:3] == ["000.1.k", "000.1.v", "001.1.k"]
    assert [name for name, _ in recording.checkpoints[BLOCK].arrays][:3] == [
        "000.0.00",
        "000.0.01",
        "001.0.00",
    ]


def test_bytes_per_token_are_measured_on_the_caches() -> None:
    model = model_of("llama", "bfloat16")
    recording = Recording(model, prompt(BLOCK + 3))
    assert recording.layout.kv_bytes_per_token(recording.make_caches()) == 0
    assert recording.layout.kv_bytes_per_token(recording.caches) == 4 * 2 * 2 * 32 * 2


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (object(), "object is unknown"),
        (LayerCache(8), "LayerCache is unknown"),
        (RotatingKVCache(64, keep=4), "RotatingKVCache keeps its first 4 tokens"),
        (BatchKVCache([0]), "BatchKVCache is unknown"),
        (Subclassed(), "Subclassed is unknown"),
    ],
)
def test_what_cannot_be_cut_or_held_is_refused_by_name(cache: Any, why: str) -> None:
    with pytest.raises(CacheUnsupported, match=why) as caught:
        CacheLayout.of([KVCache(), CacheList(KVCache(), cache)], block_token_count=BLOCK)
    assert caught.value.reason is Reason.CACHE_UNSUPPORTED
    assert caught.value.metadata["cache_class"] == type(cache).__name__


def test_caches_of_another_class_than_the_layouts_are_a_broken_invariant() -> None:
    recording = Recording(model_of("llama"), prompt(BLOCK))
    quantized = [cache.to_quantized(group_size=32, bits=8) for cache in recording.caches]
    with pytest.raises(AssertionError):
        recording.layout.cut_tokens(RegionKind.KV, quantized, start=0, stop=BLOCK)
