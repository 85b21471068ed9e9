"""The memory of the pretended device, and runners that load their models into it slice by slice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator
from typing import Any

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.model import ModelInfo
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.core.ports import MemoryUse
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.errors import model_invalid

from tests.fixtures.engine import model_info
from tests.system.sim.model import CONTEXT_TOKEN_LIMIT, ModelSpec
from tests.system.sim.runner import SimRunner
from tests.system.sim.setup import BLOCK


class PoolDevice:
    """What all models hold. A runner's memory is its own until it is closed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.runners: list[PooledRunner] = []
        self.complaints: list[str] = []
        """Passes that took more than there is."""

    @property
    def weight_bytes(self) -> dict[str, int]:
        """What each model has loaded; a model that was not given back may be there twice."""
        held: dict[str, int] = {}
        for runner in self.runners:
            if runner.loaded_bytes:
                held[runner.name] = held.get(runner.name, 0) + runner.loaded_bytes
        return held

    @property
    def running_bytes(self) -> int:
        """Weights, and KV of sequences."""
        return sum(self.weight_bytes.values()) + sum(runner.kv_bytes for runner in self.runners)

    @property
    def active_bytes(self) -> int:
        """All of it, blocks in RAM too."""
        return self.running_bytes + sum(runner.block_bytes for runner in self.runners)

    def check_pass(self, name: str) -> None:
        """Note a pass that did not fit. An engine would take a failure for its own."""
        if self.active_bytes > self.limit_bytes:
            blocks = {runner.name: runner.block_bytes for runner in self.runners if runner.block_bytes}
            self.complaints.append(
                f"a pass of {name}: {self.active_bytes} of {self.limit_bytes} bytes, weights "
                f"{self.weight_bytes}, with KV {self.running_bytes}, blocks in RAM {blocks}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPlan:
    """How one load goes."""

    size_bytes: int
    slice_count: int = 3
    fails_at: int | None = None
    """The slice in which a file turns out to be gone or a lie."""
    breaks: bool = False
    """Whether that is no error that anybody expects."""


class PooledRunner(SimRunner):
    """The runner of one of several models on one device."""

    def __init__(
        self, name: str, spec: ModelSpec, *, device: PoolDevice, plan: LoadPlan, dice: random.Random
    ) -> None:
        super().__init__(spec, block_token_count=BLOCK, dice=dice)
        self.name = name
        self.loaded_bytes = 0
        self.cache: PrefixCache | None = None
        self.is_broken = False
        """Whether its next pass raises what nobody expects."""
        self._device, self._plan = device, plan
        device.runners.append(self)

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
        plan = self._plan
        for index in range(plan.slice_count):
            if index == plan.fails_at:
                if plan.breaks:
                    raise OSError("injected: the file is gone")
                raise model_invalid("injected: the file is a lie")
            self.loaded_bytes = plan.size_bytes * (index + 1) // plan.slice_count
            yield
        info = model_info(context_token_limit=CONTEXT_TOKEN_LIMIT)
        return dataclasses.replace(info, model_id=self.name, weight_bytes=plan.size_bytes)

    def memory_model(self) -> MemoryModel:
        """A token takes what its rows take in a block."""
        spec, row_bytes = self.spec, 8
        return dataclasses.replace(
            super().memory_model(),
            kv_bytes_per_token=2 * row_bytes if spec.has_kv else 0,
            fixed_bytes_per_sequence=row_bytes * (spec.window_token_count + spec.has_state),
        )

    @property
    def kv_bytes(self) -> int:
        live = [*self.open_caches.values(), *(row.caches for row in self.decoding.values())]
        return sum(self.memory_model().kv_bytes(caches.position) for caches in live if caches.position)

    @property
    def block_bytes(self) -> int:
        """Of blocks in RAM. Where KV lies in pages, that of a sequence's blocks is the sequence's own."""
        if self.cache is None:
            return 0
        shared = set().union(*self.cache.used_by.values()) if self._has_pages else set()
        mine = (node.ram.get(RegionKind.KV) for node in self.cache.tree.in_ram() if node.hash in shared)
        return self.cache.tree.ram.used_bytes - sum(region.size_bytes for region in mine if region)

    def memory(self) -> MemoryUse:
        return MemoryUse(self._device.active_bytes, 2)

    def run(self, *args: Any, **how: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("injected: the device fails")
        result = super().run(*args, **how)
        self._device.check_pass(self.name)
        return result

    def close(self) -> None:
        if not self.is_broken:
            super().close()
        for place in (self.open_caches, self.restoring, self.decoding, self._vectors, self._layered):
            place.clear()
        self.loaded_bytes = 0
