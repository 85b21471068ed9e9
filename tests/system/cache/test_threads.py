"""What the inference thread never does: files, SQLite, waiting; and what never leaves it: mx.arrays."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.blocks import HostBlock, HostTensor
from icehouse_server.storage.api import (
    BlockPersisted,
    BlocksEvicted,
    BlocksLoaded,
    Inventory,
    Outcome,
    Ticket,
)
from icehouse_server.storage.local.tier import LocalTier

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

_FORBIDDEN = ("open", "sqlite3.", "os.", "shutil.", "socket.", "subprocess.", "time.sleep")


class Auditor:
    """Counts the audit events of threads by name; the interpreter keeps a hook for ever, so there is one."""

    def __init__(self) -> None:
        self.events: Counter[tuple[str, str]] = Counter()
        self.is_on = False
        self._is_installed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        if not self._is_installed:
            self._is_installed = True
            sys.addaudithook(self._note)
        self.events.clear()
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def of(self, thread_name: str) -> dict[str, int]:
        """Return the forbidden events of one thread."""
        return {
            event: count
            for (name, event), count in self.events.items()
            if name == thread_name and event.startswith(_FORBIDDEN)
        }

    def _note(self, event: str, arguments: tuple) -> None:
        if self.is_on and not event.startswith("object."):
            self.events[threading.current_thread().name, event] += 1


AUDITOR = Auditor()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_no_file_and_no_sqlite_on_the_inference_thread(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    prompts = [prompt(6 * BLOCK + 3, salt=salt) for salt in range(3)]
    with CacheServer(folder, tmp_path / "blocks") as served:
        served.ask("measure", prompts[0], max_output_tokens=0)
        ram_bytes = served.cache.tree.ram.used_bytes
    with CacheServer(folder, tmp_path / "blocks", ram_bytes=ram_bytes, spill_policy="write_behind") as served:
        served.ask("first step", prompt(BLOCK, salt=9))
        with AUDITOR.listening():
            for turn in range(2):
                for i, tokens in enumerate(prompts):
                    served.submit(f"{turn} {i}", tokens, max_output_tokens=12)
                for i in range(len(prompts)):
                    served.answer(f"{turn} {i}")
                served.settle()
            served.submit("gone", prompts[0], max_output_tokens=100)
            served.stats()
        _, stats = served.stats()
    assert stats.spill.persisted_block_total > 0 and stats.promote.promoted_block_total > 0
    assert AUDITOR.of("inference") == {}
    # The hook does see: the storage thread and the readers do nothing else.
    assert AUDITOR.of("storage") and any(AUDITOR.of(f"storage-reader-{n}") for n in range(2))


def test_nothing_that_crosses_holds_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything the storage thread is given or gives back is searched to its leaves."""
    crossed: list[object] = []
    put, take = LocalTier.put, CacheServer._take

    def noted_put(self: LocalTier, block: HostBlock, **told: Any) -> Ticket[BlockPersisted]:
        crossed.append(block)
        return put(self, block, **told)

    def noted_take(self: CacheServer, outcome: Outcome) -> None:
        crossed.append(outcome.outcome if isinstance(outcome, Ticket) else outcome)
        take(self, outcome)

    monkeypatch.setattr(LocalTier, "put", noted_put)
    monkeypatch.setattr(CacheServer, "_take", noted_take)
    folder = tiny_model_dir(tmp_path, "gemma3_text", dtype="bfloat16")
    for turn in range(2):
        with CacheServer(folder, tmp_path / "blocks") as served:
            served.ask(f"turn {turn}", prompt(4 * BLOCK + 3))
    assert {HostBlock, BlocksLoaded, BlockPersisted, Inventory} <= {type(item) for item in crossed}
    assert not any(isinstance(leaf, mx.array) for item in crossed for leaf in _leaves(item))


def test_a_host_tensor_cannot_hold_an_array() -> None:
    for data in (mx.zeros((4,)), [mx.zeros((4,))], b"1234"):
        with pytest.raises(AssertionError):
            HostTensor("x", "F32", (4,), data)


def _leaves(found: object) -> Iterator[object]:
    """Yield a message and all that its fields refer to."""
    seen: set[int] = set()
    waiting = [found]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, list | tuple | frozenset | dict) or hasattr(type(item), "__dataclass_fields__"):
            waiting += gc.get_referents(item)


def test_the_search_finds_an_array_in_a_message() -> None:
    hidden = BlocksEvicted(({"a": [mx.zeros((1,))]},))
    assert any(isinstance(leaf, mx.array) for leaf in _leaves(hidden))
