"""Engines under one limit of memory: who is at work gets what idle ones keep, and no token changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.runner.forward.splits import Attention

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

_LONG = 40 * BLOCK
_AMPLE_BYTES = 1 << 30


@pytest.fixture
def thread() -> Iterator[InferenceThread]:
    thread = InferenceThread(SystemClock())
    thread.start()
    yield thread
    thread.end()
    assert thread.join(timeout_s=BOUND_S)


@pytest.mark.parametrize("attention", [Attention.AUTO, Attention.ROWS])
def test_who_is_short_of_memory_gets_what_an_idle_model_keeps(
    tmp_path: Path, attention: Attention, thread: InferenceThread
) -> None:
    folders = [tiny_model_dir(tmp_path, "llama", name=name, seed=seed) for seed, name in enumerate("ab")]
    budget = MemoryBudget(_AMPLE_BYTES)
    with contextlib.ExitStack() as stack:
        idle, busy = (
            stack.enter_context(CacheServer(folder, None, thread=thread, budget=budget, attention=attention))
            for folder in folders
        )
        before = idle.ask("before", prompt(_LONG))
        busy.ask("first", prompt(2 * BLOCK))
        idle.stats()  # answered when its request is through
        kept_bytes, model = idle.cache.tree.ram.used_bytes, busy.engine._runner.memory_model()
        needed_bytes = model.request_bytes(token_count=_LONG + 8, chunk_token_count=BLOCK)
        held_bytes = max(kept_bytes, idle.engine._runner.pages.held_bytes)
        limit_bytes = budget.limit_bytes = mx.get_active_memory() + needed_bytes - held_bytes // 2
        answer = busy.ask("short", prompt(_LONG, salt=1))
        assert busy.stats()[0].parked_total == 0
        assert idle.cache.tree.ram.used_bytes < kept_bytes
        assert mx.get_active_memory() <= limit_bytes
        budget.limit_bytes = _AMPLE_BYTES
        assert idle.ask("again", prompt(_LONG)).tokens == before.tokens
        assert busy.ask("same", prompt(_LONG, salt=1)).tokens == answer.tokens


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.parametrize("attention", [Attention.AUTO, Attention.ROWS])
def test_weights_and_pages_and_ram_tiers_together_keep_to_the_limit(
    tmp_path: Path, kind: str, attention: Attention, thread: InferenceThread
) -> None:
    """Each RAM tier could have all of it by its own limit."""
    folders = [tiny_model_dir(tmp_path, kind, name=name, seed=seed) for seed, name in enumerate("ab")]
    budget = MemoryBudget(_AMPLE_BYTES)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(CacheServer(folder, None, thread=thread, budget=budget, attention=attention))
            for folder in folders
        ]
        token_count = 20 * BLOCK
        for served in servers:
            served.ask("first", prompt(BLOCK))
        model = servers[0].engine._runner.memory_model()
        needed_bytes = model.request_bytes(token_count=token_count + 8, chunk_token_count=BLOCK)
        budget.limit_bytes = mx.get_active_memory() + 3 * needed_bytes
        kept_bytes = []
        for number in range(12):
            served = servers[number % 3 // 2]
            assert served.ask(f"{number}", prompt(token_count, salt=number)).tokens
            served.stats()  # answered behind its last step
            assert (
                sum(share.fixed_bytes + share.varying_bytes() for share in budget._shares)
                <= budget.limit_bytes
            )
            assert mx.get_active_memory() <= budget.limit_bytes
            kept_bytes.append(sum(each.cache.tree.ram.used_bytes for each in servers))
        assert max(kept_bytes) > 2 * model.kv_bytes(token_count), "nothing was kept"
        assert max(kept_bytes) < 10 * model.kv_bytes(token_count), "nobody gave way"
