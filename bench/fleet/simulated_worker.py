"""Simulated worker: two tiers of prefixes, least recently used first, and the time its work takes.

A tier holds whole prefixes, one for each agent's instructions and one for what each session adds to them;
the real one lets go of a prefix block by block, from its end. Whatever RAM lets go of is on SSD afterwards.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import NewType

PrefixKey = NewType("PrefixKey", int)
"""A session by its number from 0 on, an agent's instructions by one below 0."""


def agent_key(agent: int) -> PrefixKey:
    """Return the key of an agent's instructions."""
    return PrefixKey(-1 - agent)


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What one worker's work costs, as measured there; sizes in bytes, rates in tokens per second."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of all streams together, at the usual number of them."""
    restore_tokens_per_s: float
    """From SSD; from RAM is taken to cost nothing."""
    kv_bytes_per_token: int
    block_token_count: int
    ram_bytes: int
    ssd_bytes: int
    gateway_s: float
    """What the gateway adds to the time to first token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of a prompt that a worker has, by tier."""

    ram_count: int
    ssd_count: int

    @property
    def count(self) -> int:
        """From both."""
        return self.ram_count + self.ssd_count


class Tier:
    """Prefixes by their tokens, within a limit."""

    def __init__(self, token_limit: int) -> None:
        self._limit = token_limit
        self._held: collections.OrderedDict[PrefixKey, int] = collections.OrderedDict()
        self._token_count = 0

    def get(self, key: PrefixKey) -> int:
        """Return how many tokens of a prefix are here."""
        return self._held.get(key, 0)

    def put(self, key: PrefixKey, token_count: int) -> list[tuple[PrefixKey, int]]:
        """Hold a prefix of this length, now the most recently used one; return what had to leave."""
        self._token_count += token_count - self._held.pop(key, 0)
        self._held[key] = token_count
        gone = []
        while self._token_count > self._limit and self._held:
            other, count = self._held.popitem(last=False)
            self._token_count -= count
            gone.append((other, count))
        return gone

    def items(self) -> list[tuple[PrefixKey, int]]:
        """Return all of it, the least recently used first."""
        return list(self._held.items())


class SimulatedWorker:
    """One worker: what it has, and until when it is busy."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._ram = Tier(costs.ram_bytes // costs.kv_bytes_per_token)
        self._ssd = Tier(costs.ssd_bytes // costs.kv_bytes_per_token)
        self._free_time_s = 0.0
        self.busy_s = 0.0
        self.written_token_count = 0
        self.request_count = 0
        self.running_count = 0

    def known(self, agent: PrefixKey, session: PrefixKey) -> Reuse:
        """Return what it has of a session's prompt, in whole blocks from its first token on."""
        ram_count = ssd_count = 0
        for key in (agent, session):
            in_ram, on_ssd = self._ram.get(key), self._ssd.get(key)
            ram_count += in_ram
            ssd_count += 0 if in_ram else on_ssd
            if not (in_ram or on_ssd):
                break
        count = ram_count + ssd_count
        cut = count % self._costs.block_token_count
        # What is cut off is the end, which is the session's own where there is any.
        return Reuse(ram_count, ssd_count - cut) if ssd_count >= cut else Reuse(ram_count - cut, ssd_count)

    def has(self, key: PrefixKey) -> bool:
        """Whether any of a prefix is here."""
        return bool(self._ram.get(key) or self._ssd.get(key))

    def serve(
        self, reuse: Reuse, *, now_s: float, prompt_token_count: int, output_token_count: int
    ) -> tuple[float, float]:
        """Take a request behind those it has; return when its first and its last token come.

        Readers fetch from SSD while the worker computes for others. Prompts are computed one after the other
        here; what all streams decode meanwhile is charged with the request that it is for.
        """
        costs = self._costs
        prefill_s = (prompt_token_count - reuse.count) / costs.prefill_tokens_per_s
        decode_s = output_token_count / costs.decode_tokens_per_s
        free_time_s = max(now_s, self._free_time_s)
        first_time_s = max(free_time_s, now_s + reuse.ssd_count / costs.restore_tokens_per_s) + prefill_s
        self._free_time_s = free_time_s + prefill_s + decode_s
        self.busy_s += prefill_s + decode_s
        self.request_count += 1
        return first_time_s, first_time_s + decode_s

    def keep(self, key: PrefixKey, token_count: int) -> list[PrefixKey]:
        """Hold a prefix in RAM; return the prefixes that it has no longer, in either tier."""
        lost = []
        for other, count in self._ram.put(key, token_count):
            lost += self._spill(other, count)
        return lost

    def flush(self) -> None:
        """Write what is in RAM alone, as a worker that stops."""
        for key, count in self._ram.items():
            self._spill(key, count)

    def _spill(self, key: PrefixKey, token_count: int) -> list[PrefixKey]:
        written = self._ssd.get(key)
        if written < token_count:
            # The last block is written again when it has grown.
            self.written_token_count += token_count - written + written % self._costs.block_token_count
        return [gone for gone, _ in self._ssd.put(key, max(written, token_count)) if not self._ram.get(gone)]
