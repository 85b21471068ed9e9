"""Sampling row: the sampling state of one decoding sequence, with its bias, penalties and bans (inference
thread)."""

from __future__ import annotations

import collections
import copy
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from icehouse_server.domain.response_format import Constraint
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import DecodeRow
from icehouse_server.errors import IcehouseError

Ids = npt.NDArray[np.int32]
Values = npt.NDArray[np.float32]


class SamplingRow:
    """Parameters, the number of tokens drawn, and state that depends on the tokens."""

    def __init__(self, row: DecodeRow, *, end_token_ids: Collection[int] = ()) -> None:
        params = row.sampling
        self.params: SamplingParams = params
        self.drawn_count = len(row.output_token_ids)
        """Advanced by each draw: on a pipelined device, before the token is known."""
        self.end_token_ids = tuple(dict.fromkeys((*end_token_ids, *params.stop_token_ids)))
        self.logprobs = row.logprobs
        self.constraint: Constraint | None = row.constraint
        if row.constraint is not None:
            for token_id in row.output_token_ids:
                row.constraint.accept(token_id)
        tokens = {"prompt_token_ids": row.prompt_token_ids, "output_token_ids": row.output_token_ids}
        has_penalty = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self.edits = LogitEdits(params, **tokens) if has_penalty or params.logit_bias else None
        self.bans: Bans | None = None
        if params.banned or params.min_output_token_count:
            self.bans = Bans(params, end_token_ids=self.end_token_ids, **tokens)
        self.is_else_plain = self.edits is None and self.bans is None
        """Whether the model's logits are taken as they are, except for a constraint."""
        self.is_plain = self.is_else_plain and self.constraint is None
        self.needs_tokens = (
            self.constraint is not None
            or (self.edits is not None and not self.edits.is_static)
            or (self.bans is not None and not self.bans.is_static)
        )
        """Whether the next draw depends on the tokens drawn before, and so waits until they are known."""

    def ahead(self, count: int) -> SamplingRow:
        """Return this row as it will be after `count` draws; only if it does not need their tokens."""
        assert not self.needs_tokens
        later = copy.copy(self)
        later.drawn_count += count
        return later

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether top_p, min_p or top_k exclude anything before any XTC is applied."""
        params = self.params
        return params.top_p < 1.0 or params.min_p > 0.0 or (params.top_k > 0 and not self.has_late_top_k)

    @property
    def has_late_top_k(self) -> bool:
        """Whether top_k counts what XTC left, instead of sharing the ranking of top_p."""
        return self.params.top_k > 0 and self.params.xtc_probability > 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether the constraint limits the next draw."""
        constraint = self.constraint
        return constraint is not None and not (constraint.is_finished or constraint.allows_any)

    @property
    def is_complete(self) -> bool:
        """Whether the constraint allows nothing after the tokens accepted so far."""
        return self.constraint is not None and self.constraint.is_finished

    @property
    def error(self) -> IcehouseError | None:
        """Why the constraint cannot go on."""
        return self.constraint.error if self.constraint is not None else None

    def allows(self, token_id: int) -> bool:
        """Whether the constraint, if there is one, allows this token next."""
        return self.constraint is None or self.constraint.allows(token_id)

    def accept(self, token_id: int) -> None:
        """Continue after a token that was drawn and is now known."""
        if self.edits is not None:
            self.edits.accept(token_id)
        if self.bans is not None:
            self.bans.accept(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)


class EditTable(NamedTuple):
    """Changes to one row's logits, in columns: add `bias`, divide by `divisor` (multiply below zero), then
    subtract `shift`. Each token appears once."""

    token_ids: Ids
    bias: Values
    divisor: Values
    shift: Values


class LogitEdits:
    """The tokens of one row that bias and penalties affect, and how often each was seen.

    They are kept on the host, where counting a token touches a few array cells. So a step sends the device
    one short table per row instead of a value for every entry of the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, *, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        output = list(output_token_ids)
        everything = [*prompt_token_ids, *output] if params.repetition_penalty != 1.0 else []
        self._windows = [
            _Window(params.repetition_window, everything, is_on=params.repetition_penalty != 1.0),
            _Window(params.presence_window, output, is_on=params.presence_penalty != 0.0),
            _Window(params.frequency_window, output, is_on=params.frequency_penalty != 0.0),
        ]
        self.is_static = not any(window.is_on for window in self._windows)
        """Whether there is only a bias, so that no token changes anything."""
        biased = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int32)
        seen = [np.array(window.tokens, dtype=np.int32) for window in self._windows]
        self._ids: Ids = np.unique(np.concatenate([biased, *seen]))
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids.tolist())}
        self._size = len(self._ids)
        self._bias: Values = np.zeros(self._size, dtype=np.float32)
        self._bias[np.searchsorted(self._ids, biased)] = [bias for _, bias in params.logit_bias]
        self._counts = np.stack(
            [np.bincount(np.searchsorted(self._ids, tokens), minlength=self._size) for tokens in seen]
        ).astype(np.int32)

    def accept(self, token_id: int) -> None:
        for kind, window in enumerate(self._windows):
            if not window.is_on:
                continue
            slot = self._slot(token_id)
            self._counts[kind, slot] += 1
            gone = window.push(token_id)
            if gone is not None:
                self._counts[kind, self._slots[gone]] -= 1

    def table(self) -> EditTable:
        """Return the changes to the next logits; valid until the next `accept`."""
        params = self._params
        repeated, present, frequent = self._counts[:, : self._size]
        shift = params.presence_penalty * (present > 0) + params.frequency_penalty * frequent
        return EditTable(
            token_ids=self._ids[: self._size],
            bias=self._bias[: self._size],
            divisor=np.where(repeated > 0, params.repetition_penalty, 1.0).astype(np.float32),
            shift=shift.astype(np.float32),
        )

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._size
            if self._size == len(self._ids):
                added = max(64, len(self._ids))
                self._ids = np.pad(self._ids, (0, added))
                self._bias = np.pad(self._bias, (0, added))
                self._counts = np.pad(self._counts, ((0, 0), (0, added)))
            self._ids[slot] = token_id
            self._size += 1
        return slot


class _Window:
    """The last `limit` tokens of a growing list; 0 means all of them, and then none is remembered."""

    def __init__(self, limit: int, tokens: list[int], *, is_on: bool) -> None:
        self.is_on = is_on
        self.tokens = tokens[-limit:] if limit else tokens
        self._recent = collections.deque(self.tokens if limit else (), maxlen=limit or None)
        self._limit = limit

    def push(self, token_id: int) -> int | None:
        """Add a token; return the token that left the window, if any."""
        if not self._limit:
            return None
        gone = self._recent[0] if len(self._recent) == self._limit else None
        self._recent.append(token_id)
        return gone


class Bans:
    """Tokens that one row may not draw next, including end tokens that would come too early. Bans yield if
    they would leave no token at all."""

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
        """Whether the drawn tokens change nothing; their number may."""
        return not self._last_ids

    def accept(self, token_id: int) -> None:
        self._tail.append(token_id)

    def tokens(self, drawn_count: int) -> list[int]:
        """Return the tokens that may not be drawn next, after `drawn_count` tokens."""
        banned = list(self._always)
        if drawn_count < self._min_output_token_count:
            banned += self._end_token_ids
        tail = tuple(self._tail)
        for length in self._prefix_lengths:
            if length <= len(tail):
                banned += self._last_ids.get(tail[len(tail) - length :], ())
        return banned
