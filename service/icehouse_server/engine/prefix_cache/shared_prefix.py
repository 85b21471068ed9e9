"""Shared prefix: what other servers have stored of a prompt comes to SSD before the prompt is planned.

Inference thread only. It is asked once for a prompt, by the names of the full blocks that are missing here.
What a lookup and a fetch may take is a share of what computing the same tokens would; when that is over, the
plan counts with what has come by then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.engine.core.sequence import Sequence as Row
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.matching import Prompt
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.storage.api import Found, Ticket

_LOOKUP_SHARE = 0.1
_FETCH_SHARE = 0.5
"""Of the time in which the missing tokens would be computed."""
_LEAST_LOOKUP_S = 0.003
"""No store answers faster."""
_MOST_LOOKUP_S = 2.0
_LEAST_FETCH_S = 0.5
_UNMEASURED_FETCH_S = 5.0
"""While it is not known how fast this server computes."""
_SSD_SHARE = 0.5
"""Of the SSD tier, what one prompt's fetch may fill."""


_Step = tuple[Ticket[Any], float]
"""A ticket, and how long it is waited for."""


class SharedPrefixes:
    """Asks for what prompts lack. Without an object store nothing is asked."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._asked: set[SequenceId] = set()
        """Sequences whose question is being answered, until they are planned."""

    def forget(self, sequence: Row) -> None:
        self._asked.discard(sequence.sequence_id)

    def ask(self, sequence: Row, then: Callable[[], object]) -> bool:
        """Have a prompt's missing blocks brought, and call `then` when they are here or given up. False, and
        no call, where nothing is missing, nobody to be asked, or was asked for this sequence already."""
        if sequence.sequence_id in self._asked:
            self._asked.discard(sequence.sequence_id)
            return False
        if not (self._cache.spills.is_on and self._cache.may_write(sequence)):
            return False
        if not self._go_on(self._steps(self._cache.prompt_of(sequence)), then):
            return False
        self._asked.add(sequence.sequence_id)
        return True

    def _go_on(
        self, steps: Generator[_Step, Any, None], then: Callable[[], object], outcome: object = None
    ) -> bool:
        """Go on to the next ticket, which the steps get the outcome of; False at their end."""
        try:
            ticket, limit_s = steps.send(outcome)
        except StopIteration:
            return False

        def come(outcome: object) -> None:
            if not self._go_on(steps, then, outcome):
                then()

        self._cache.waits.add(ticket, come, limit_s=limit_s)
        return True

    def _steps(self, prompt: Prompt) -> Generator[_Step, Any, None]:
        """Ask for the chain below each root that lacks something until somebody has its beginning; have that
        brought."""
        rates = self._cache.rates
        for root in prompt.roots:
            storage, missing = self._cache.storage, self._missing(prompt, root)
            limit_s = rates.prefill_s(self._token_count(missing)) * _LOOKUP_SHARE or _MOST_LOOKUP_S
            if storage is None or not missing or limit_s < _LEAST_LOOKUP_S:
                continue
            ticket = storage.find(tuple(each.hash for each in missing), limit_s=min(limit_s, _MOST_LOOKUP_S))
            found = (yield ticket, _MOST_LOOKUP_S) if ticket is not None else None
            if isinstance(found, Found) and found.block_count:
                yield from self._fetch(found, missing[: found.block_count])
                return

    def _is_worth_it(self, found: Found, blocks: Sequence[Node]) -> bool:
        """Whether fetching is predicted to be faster than computing, and there is space for it; older blocks
        of the same tenant go for it where its quota requires it."""
        settings, rates = self._cache.settings, self._cache.rates
        if settings.may_recompute and rates.fetch_is_slower(found, token_count=self._token_count(blocks)):
            rates.unfetched_count += 1
            return False
        if settings.ssd_limit_bytes and found.size_bytes > settings.ssd_limit_bytes * _SSD_SHARE:
            return False
        return self._cache.spills.fits_quota(blocks[0], found.size_bytes, ())

    def _fetch(self, found: Found, blocks: Sequence[Node]) -> Iterator[_Step]:
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
            yield ticket, max(prefill_s * _FETCH_SHARE, _LEAST_FETCH_S) if prefill_s else _UNMEASURED_FETCH_S

    def _missing(self, prompt: Prompt, root: BlockHash) -> list[Node]:
        """Return the full blocks of a prompt from the first that is not here; of a model whose blocks have
        nothing but checkpoints, those where one is due."""
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
        """Return the tokens that would have to be computed without these."""
        size = self._cache.settings.block_token_count
        if not blocks:
            return 0
        if not self._cache.facts.has_kv and self._cache.facts.needs_checkpoint:
            return blocks[-1].start_token_index + size
        return blocks[-1].start_token_index + size - blocks[0].start_token_index
