"""Bad words: tokens that one row may not draw next, ends that come too early among them."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from icehouse_server.domain.sampling import SamplingParams


class Bans:
    """One row's bans. A ban yields where it would leave no token at all (inference thread)."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        end_token_ids: Collection[int],
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        self._min_output_token_count = params.min_output_token_count
        self._end_token_ids = tuple(end_token_ids)
        self._always = tuple(banned[0] for banned in params.banned if len(banned) == 1)
        self._last_ids: dict[tuple[int, ...], list[int]] = {}
        for banned in params.banned:
            if len(banned) > 1:
                self._last_ids.setdefault(banned[:-1], []).append(banned[-1])
        self._prefix_lengths = sorted({len(prefix) for prefix in self._last_ids})
        longest = self._prefix_lengths[-1] if self._prefix_lengths else 0
        tokens = [*prompt_token_ids[-longest:], *output_token_ids] if longest else []
        self._tail = collections.deque(tokens, maxlen=longest)

    @property
    def is_static(self) -> bool:
        """Whether no token that is drawn changes anything; their number may."""
        return not self._last_ids

    def accept(self, token_id: int) -> None:
        """Remember a token that was drawn."""
        self._tail.append(token_id)

    def tokens(self, drawn_count: int) -> list[int]:
        """Return what may not be drawn next, `drawn_count` tokens being drawn already."""
        banned = list(self._always)
        if drawn_count < self._min_output_token_count:
            banned += self._end_token_ids
        tail = tuple(self._tail)
        for length in self._prefix_lengths:
            if length <= len(tail):
                banned += self._last_ids.get(tail[len(tail) - length :], ())
        return banned
