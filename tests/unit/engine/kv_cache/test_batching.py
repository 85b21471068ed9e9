"""The contract with mlx-lm's non-public corners: this fails when they move."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import mlx.core as mx
import pytest
from icehouse_server.engine.kv_cache import batching, cache_classes
from icehouse_server.engine.runner import mlx_lm
from mlx_lm.generate import _merge_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.utils import _tokenizer_defaults, load_tokenizer

from tests.fixtures.models import ARCHITECTURES, build
from tests.fixtures.models.vocabulary import TURN_END_ID, write_tokenizer


def test_the_private_functions_have_the_shape_we_call() -> None:
    assert list(inspect.signature(_merge_caches).parameters) == ["caches"]
    assert list(inspect.signature(_tokenizer_defaults).parameters) == ["model_path"]


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (KVCache(), True),
        (RotatingKVCache(max_size=8), True),
        (ArraysCache(2), True),
        (CacheList(KVCache(), ArraysCache(2)), True),
        (QuantizedKVCache(), False),
        (ChunkedKVCache(8), False),
        (CacheList(KVCache(), ChunkedKVCache(8)), False),
    ],
)
def test_which_classes_batch(cache, expected: bool) -> None:
    assert batching.can_batch([cache]) is expected


@pytest.mark.parametrize(("lengths", "kept"), [((3, 7), 1), ((3, 7), 0), ((7, 3), 1)])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_rows_join_leave_and_come_out_again(architecture: str, lengths: tuple[int, int], kept: int) -> None:
    model = build(architecture)
    rows = []
    for length in lengths:
        caches = cache_classes.make_caches(model)
        mx.eval(model(mx.arange(5, 5 + length)[None], cache=caches), cache_classes.cache_states(caches))
        rows.append(caches)
    if not batching.can_batch(rows[0]):
        with pytest.raises(ValueError, match="batching"):
            batching.merge_caches(rows)
        return
    batch = batching.extend_caches(batching.merge_caches(rows[:1]), batching.merge_caches(rows[1:]))
    mx.eval(model(mx.array([[9], [9]]), cache=batch))
    for cache in batch:
        cache.filter([kept])
    out = [cache.extract(0) for cache in batch]
    alone = model(mx.array([[9]]), cache=rows[kept])
    mx.eval(alone, cache_classes.cache_states(out))
    again = model(mx.array([[11]]), cache=out)
    expected = model(mx.array([[11]]), cache=rows[kept])
    assert mx.allclose(again, expected, atol=1e-4).item()


def tokenizer_folder(folder: Path, **config: object) -> Path:
    """Write a tokenizer with these extra entries in its configuration, and no model."""
    write_tokenizer(folder, context_token_limit=64, chat_template=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("eos_token_ids", [None, TURN_END_ID, [TURN_END_ID]])
def test_the_tokenizer_is_the_one_that_mlx_lm_reads(tmp_path: Path, eos_token_ids: object) -> None:
    folder = tokenizer_folder(tmp_path)
    ours = mlx_lm.read_tokenizer(folder, eos_token_ids=eos_token_ids, trust_remote_code=False)
    theirs = load_tokenizer(folder, eos_token_ids=eos_token_ids)
    assert ours.eos_token_ids == theirs.eos_token_ids
    turns = [{"role": "user", "content": "the café 🧊"}]
    chats = [t.apply_chat_template(turns, add_generation_prompt=True) for t in (ours, theirs)]
    assert chats[0] == chats[1] and ours.has_chat_template
    assert ours.decode(ours.encode("the café 🧊")) == theirs.decode(theirs.encode("the café 🧊"))


def test_a_chat_template_written_in_python_is_found(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, chat_template_type="deepseek_v32")
    wrapper = mlx_lm.read_tokenizer(folder, eos_token_ids=None, trust_remote_code=False)
    text = wrapper.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "<｜User｜>hi" in text
