"""Shared prefix: blocks of a prompt that other servers have stored are fetched to SSD before it is planned.

Inference thread only. The store is asked once per prompt, by the names of the full blocks missing here.
A lookup or fetch may take a share of the time that computing the same tokens would; after that, the plan
uses the blocks that have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.sequence import Sequence as Row
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.matching import LookupPrompt
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Awaited, Steps
from icehouse_server.storage.api import ChainFound

_LOOKUP_SHARE = 0.1
_FETCH_SHARE = 0.5
"""Shares of the time in which the missing tokens would be computed."""
_LEAST_LOOKUP_S = 0.003
"""No store answers faster."""
_MOST_LOOKUP_S = 2.0
_LEAST_FETCH_S = 0.5
_UNMEASURED_FETCH_S = 5.0
"""Limit of a fetch while this server's prefill rate is unknown."""
_SSD_SHARE = 0.5
"""Share of the SSD tier that one prompt's fetch may fill."""


class SharedPrefixes:
    """Fetches blocks that prompts lack here. Does nothing without an object store."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def bring(self, sequence: Row) -> Steps[None]:
        """Look up the prompt's missing blocks below each root in turn; fetch the first beginning found."""
        if not (self._cache.spills.is_on and self._cache.may_write(sequence)):
            return
        prompt, rates = self._cache.prompt_of(sequence), self._cache.rates
        for root in prompt.roots:
            storage, missing = self._cache.storage, self._missing(prompt, root)
            limit_s = rates.prefill_s(self._token_count(missing)) * _LOOKUP_SHARE or _MOST_LOOKUP_S
            if storage is None or not missing or limit_s < _LEAST_LOOKUP_S:
                continue
            ticket = storage.find(tuple(each.hash for each in missing), limit_s=min(limit_s, _MOST_LOOKUP_S))
            found = None if ticket is None else (yield Awaited(ticket, limit_s=_MOST_LOOKUP_S))
            if isinstance(found, ChainFound) and found.block_count:
                yield from self._fetch(found, missing[: found.block_count])
                return

    def _is_worth_it(self, found: ChainFound, blocks: Sequence[Node]) -> bool:
        """Whether fetching is predicted to be faster than computing, and there is space for the blocks. Older
        blocks of the same tenant are removed if its quota requires that."""
        settings, rates = self._cache.settings, self._cache.rates
        if settings.may_recompute and rates.fetch_is_slower(found, token_count=self._token_count(blocks)):
            rates.unfetched_count += 1
            return False
        if settings.ssd_limit_bytes and found.size_bytes > settings.ssd_limit_bytes * _SSD_SHARE:
            return False
        return self._cache.spills.fits_quota(blocks[0], found.size_bytes, ())

    def _fetch(self, found: ChainFound, blocks: Sequence[Node]) -> Steps[None]:
        storage, rates = self._cache.storage, self._cache.rates
        if not self._is_worth_it(found, blocks) or storage is None:
            return
        if not self._cache.facts.has_kv and self._cache.facts.needs_checkpoint:
            # One checkpoint stands for everything before it.
            blocks = blocks[-1:]
        ticket = storage.fetch(tuple(each.hash for each in blocks if not self._is_here(each.hash)))
        if ticket is not None:
            rates.unfetched_count = 0
            prefill_s = rates.prefill_s(self._token_count(blocks))
            limit_s = max(prefill_s * _FETCH_SHARE, _LEAST_FETCH_S) if prefill_s else _UNMEASURED_FETCH_S
            yield Awaited(ticket, limit_s=limit_s)

    def _missing(self, prompt: LookupPrompt, root: BlockHash) -> list[Node]:
        """Return the full blocks of a prompt from the first that is not here; for a model without kv only
        those where a checkpoint is due."""
        settings, facts = self._cache.settings, self._cache.facts
        size = settings.block_token_count
        names = self._cache.tree.chain_names(root, prompt.keys[: prompt.limit])
        parents = (root, *names)
        blocks = [Node(name, parents[i], i * size, size, owner=prompt.root) for i, name in enumerate(names)]
        if not facts.has_kv and facts.needs_checkpoint:
            interval = settings.checkpoint_interval_tokens
            blocks = [each for each in blocks if (each.start_token_index + size) % interval == 0]
        first = next((i for i, each in enumerate(blocks) if not self._is_here(each.hash)), len(blocks))
        return blocks[first:]

    def _is_here(self, name: BlockHash) -> bool:
        node = self._cache.tree.get(name)
        return node is not None and bool(node.ram or node.ssd)

    def _token_count(self, blocks: Sequence[Node]) -> int:
        """Return how many tokens would have to be computed without these blocks."""
        size = self._cache.settings.block_token_count
        if not blocks:
            return 0
        if not self._cache.facts.has_kv and self._cache.facts.needs_checkpoint:
            return blocks[-1].start_token_index + size
        return blocks[-1].start_token_index + size - blocks[0].start_token_index
