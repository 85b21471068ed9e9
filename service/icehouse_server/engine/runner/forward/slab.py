"""Slab of slots: decoding rows of like length keep their KV in one buffer, for one write and one attention.

A row of its own costs some tens of us in each layer of a pass, host and device together (`runner.slab_choice`
has it measured). Here a length class (`core.length_class`) has one buffer for each layer, [slots, heads,
length, size]; rows that lie side by side in it are one run, their lengths are known on the host, and no mask
is made while they are equal. Only attention of unlimited context is kept so, quantized or not
(`kv_cache.sharing`).

What is read out of a buffer must be evaluated before the next pass, and in a layer all rows write before any
reads: an array that still depends on a buffer makes the next write copy all of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from icehouse_server.engine.attention.cpu.softmax import computes_on_cpu
from icehouse_server.engine.kv_cache.cache_classes import class_of
from icehouse_server.engine.kv_cache.sharing import arrays_of, as_fetched, as_kept, put_arrays
from icehouse_server.engine.runner.forward.row import Row

LEAST_ROW_COUNT: Final = 4
"""Fewer rows of a length than these do not share a buffer: a run costs as much as one row, and a buffer has
four slots at least. Four rows of 40 tokens decode in 25 ms a pass instead of 28, and four callers of the
server get 1.08 times the tokens per second (20 M weights, 128 KiB of KV a token; 2-core x86, mlx 0.32.4)."""
_LEAST_SLOTS: Final = 4
_MOST_SLOTS: Final = 16
"""Of one buffer: more rows of a length get another one, since a buffer that grows is copied whole."""
_EARLY_TOKEN_COUNT: Final = 16
"""A row may leave its slot so many tokens before it must, where nobody else leaves in that pass: all that it
holds is copied. Eight rows that came together all left in one or two passes, which took 0.3 to 0.7 s instead
of 0.06 (128 KiB of KV a token; 2-core x86)."""
_MOST_STRETCHES: Final = 4
"""Of rows of one length side by side, each of which is one write; MLX's scatter is one for all, number by
number on a CPU: sixteen rows of two lengths take 13.2 ms of writing and attention so and 17.2 with it (16
layers, 8 heads of 128 numbers, 2-core x86)."""
_MOST_RUNS: Final = 3
"""That a class may have: each is one more attention, and closing gaps copies rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Like:
    """What one array of a row's keys or values of a layer is like, however many tokens it has."""

    head_count: int
    size: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, array: mx.array) -> Like:
        """Read it off an array, [1, heads, tokens, size]."""
        return cls(array.shape[1], array.shape[3], array.dtype)


Held = Mapping[int, tuple[mx.array, ...]]
"""What a row keeps by the layer's place among its caches, keys first; nothing of a row that holds no tokens
yet."""
Likes = Mapping[int, tuple[Like, ...]]


class SlotClass:
    """Some slots of one length: for each layer a buffer of keys and one of values, or several where they are
    quantized."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows: list[Row | None] = []
        """The row in each slot; none where one has ended and no other has come."""
        self.slots: dict[int, int] = {}
        self.buffers: dict[int, list[mx.array]] = {}
        """By the layer's place among a row's caches."""

    def add(self, row: Row, held: Held, likes: Likes, *, slot_count: int = 0) -> None:
        """Give a row a slot and copy what it holds there.

        `slot_count`: how many rows the class is about to have; buffers that must grow have room for these.
        """
        slot = self.rows.index(None) if None in self.rows else len(self.rows)
        for place, arrays in likes.items():
            buffers = self.buffers.setdefault(place, [])
            for number, like in enumerate(arrays):
                if number == len(buffers):
                    buffers.append(self._zeros(_slots_for(max(slot_count, slot + 1)), like))
                elif slot == buffers[number].shape[0]:
                    more = self._zeros(_slots_for(max(slot_count, slot + 1)) - slot, like)
                    buffers[number] = mx.concatenate([buffers[number], more], axis=0)
                if place in held:
                    array = held[place][number]
                    buffers[number][slot : slot + 1, :, : array.shape[2]] = array
        self.rows[slot : slot + 1] = [row]
        self.slots[id(row)] = slot

    def _zeros(self, slot_count: int, like: Like) -> mx.array:
        return mx.zeros((slot_count, like.head_count, self.length, like.size), like.dtype)

    def remove(self, row: Row) -> None:
        """Free a row's slot; nothing is copied, since others may end in the same pass."""
        slot = self.slots.pop(id(row))
        self.rows[slot] = None
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        if row.is_damaged:
            # A mask keeps a number that is not to count at nothing; times what is no number it is none.
            for buffers in self.buffers.values():
                for buffer in buffers:
                    buffer[slot] = 0
        if not self.rows:
            self.buffers.clear()

    @property
    def has_room(self) -> bool:
        return len(self.slots) < _MOST_SLOTS

    @property
    def run_count(self) -> int:
        """How many runs of slots have rows."""
        pairs = zip([None, *self.rows], self.rows, strict=False)
        return sum(1 for before, row in pairs if before is None and row is not None)

    def close_gaps(self) -> None:
        """Move rows from the end into slots that are free."""
        while None in self.rows:
            moved, last = self.rows.pop(), len(self.rows)
            if moved is None:
                continue
            slot = self.rows.index(None)
            self.rows[slot] = moved
            self.slots[id(moved)] = slot
            count = moved.token_count
            buffers = [buffer for each in self.buffers.values() for buffer in each]
            # Computed first: what still depends on a buffer makes a write to it copy all of it.
            found = [mx.contiguous(buffer[last : last + 1, :, :count]) for buffer in buffers]
            mx.eval(found)
            for buffer, held in zip(buffers, found, strict=True):
                buffer[slot : slot + 1, :, :count] = held

    def views(self, row: Row, place: int, token_count: int) -> tuple[mx.array, ...]:
        """Return what is kept of a row's first tokens, [1, heads, tokens, size] each."""
        slot = self.slots[id(row)]
        return tuple(buffer[slot : slot + 1, :, :token_count] for buffer in self.buffers[place])


def _slots_for(count: int) -> int:
    """Return how many slots there are for so many rows: 4, 6, 8, 12, 16, 24, ...

    A third of them at most is empty: these are as long as those that are used, and nobody else has them.
    """
    power = max(_LEAST_SLOTS, 1 << (count - 1).bit_length())
    middle = power // 4 * 3
    return middle if power > _LEAST_SLOTS and count <= middle else power


def _with_room(held: mx.array, token_count: int) -> mx.array:
    """Return a copy, [1, heads, tokens, size], with room for so many tokens."""
    more = token_count - held.shape[2]
    if not more:
        return mx.contiguous(held)
    like = Like.of(held)
    return mx.concatenate([held, mx.zeros((1, like.head_count, more, like.size), like.dtype)], axis=2)


def _arrays(row: Row, place: int) -> tuple[mx.array, ...]:
    """Return what a row's own cache keeps."""
    return arrays_of(row.raw_caches[place])


def _put(row: Row, place: int, arrays: Sequence[mx.array]) -> None:
    """Have a row's own cache keep what there is of the row's tokens."""
    put_arrays(row.raw_caches[place], arrays, token_count=row.token_count)


class Seat:
    """One layer's cache of one row in a slab, for what serves each row by itself."""

    __slots__ = ("_row", "cache", "cache_class", "place", "slots")

    def __init__(self, slots: SlotClass, row: Row, place: int) -> None:
        self.slots = slots
        self._row = row
        self.place = place
        self.cache = row.raw_caches[place]
        """The row's own, which keeps nothing meanwhile: it says how."""
        self.cache_class = class_of(self.cache)

    @property
    def offset(self) -> int:
        return self._row.token_count

    def make_mask(self, N: int, **asked: Any) -> Any:
        """Return what a plain cache with as many tokens does."""
        return create_attention_mask(N, offset=self.offset, **asked)

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Put [1, heads, tokens, size] behind what the row has."""
        begin, end = self.offset, self.offset + keys.shape[2]
        slot = self.slots.slots[id(self._row)]
        kept = as_kept(self.cache, keys, values)
        for buffer, new in zip(self.slots.buffers[self.place], kept, strict=True):
            buffer[slot : slot + 1, :, begin:end] = new

    def fetch(self, count: int) -> tuple[Any, Any]:
        """Return what the row has, with `count` tokens that were written behind it."""
        return as_fetched(self.cache, self.slots.views(self._row, self.place, self.offset + count))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self.write(keys, values)
        return self.fetch(keys.shape[2])


def _stretches(begins: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return from which to which rows side by side have one number, and that number."""
    found, first = [], 0
    for begin, same in itertools.groupby(begins):
        last = first + sum(1 for _ in same)
        found.append((first, last, begin))
        first = last
    return found


class SlotRun:
    """Rows side by side in a class, each with one token in a pass: one write, one attention."""

    def __init__(self, slots: SlotClass, rows: Sequence[Row]) -> None:
        """`rows` lie in consecutive slots, in this order."""
        self._slots = slots
        self._caches = rows[0].raw_caches
        """One row's own, of the same kinds as the others'."""
        self._first = slots.slots[id(rows[0])]
        self._last = self._first + len(rows)
        begins = [row.token_count for row in rows]
        self._end = max(begins) + 1
        self._stretches = _stretches(begins)
        self._numbers = mx.arange(self._first, self._last)
        self._begins = mx.array(begins)
        is_even = len(self._stretches) == 1
        self._is_scattered = len(self._stretches) > (_MOST_STRETCHES if computes_on_cpu() else 1)
        self.mask = None if is_even else (mx.arange(self._end) <= self._begins[:, None])[:, None, None, :]

    def write(self, place: int, keys: mx.array, values: mx.array) -> None:
        """Put [rows, heads, 1, size] behind what each row has."""
        kept = as_kept(self._caches[place], keys, values)
        for buffer, new in zip(self._slots.buffers[place], kept, strict=True):
            if self._is_scattered:
                buffer[self._numbers, :, self._begins] = new[:, :, 0]
            else:
                self._write_stretches(buffer, new)

    def fetch(self, place: int) -> tuple[Any, Any]:
        """Return what they attend to, [rows, heads, tokens, size], once it is written."""
        found = [buffer[self._first : self._last, :, : self._end] for buffer in self._slots.buffers[place]]
        return as_fetched(self._caches[place], found)

    def _write_stretches(self, buffer: mx.array, new: mx.array) -> None:
        """Put rows of one length into their slots together."""
        for first, last, begin in self._stretches:
            part = new[first:last] if len(self._stretches) > 1 else new
            buffer[self._first + first : self._first + last, :, begin : begin + 1] = part


class Slab:
    """All length classes of one ForwardPass."""

    def __init__(self, row: Row, places: Sequence[int]) -> None:
        """`places` are those among a row's caches that can share; `row` holds some tokens."""
        self.places = tuple(places)
        self._likes = {place: tuple(map(Like.of, _arrays(row, place))) for place in self.places}
        self.token_limit = sys.maxsize
        """Rows that grow longer leave."""
        self._slots: list[SlotClass] = []
        """In the order in which they were made; several may be of one length."""
        self._seated: dict[int, SlotClass] = {}
        self._shown: set[int] = set()
        """Rows whose own caches are views of a buffer since they were looked at."""

    def seat(self, row: Row, *, more: int = 1, slot_count: int = 0) -> None:
        """Move a row's KV into a slot with room for `more` tokens.

        `slot_count`: how many rows its class is about to have.
        """
        if id(row) in self._seated:
            return
        held = {place: _arrays(row, place) for place in self.places if row.token_count}
        self._add(row, held, more=more, slot_count=slot_count)
        row.keepers.append(self)
        self._clear(row)

    def settle(self, row: Row) -> None:
        """Let a row's own caches be views of its slot: evaluate what is made of them before the next pass."""
        slots = self._seated[id(row)]
        for place in self.places:
            _put(row, place, slots.views(row, place, row.token_count))
        self._shown.add(id(row))

    def leave(self, row: Row, *, more: int = 0) -> None:
        """Copy a row's KV into caches of its own with room for `more` tokens, and free its slot."""
        room = row.room_for(more) if more else row.token_count
        slots = self._seated[id(row)]
        copies: list[mx.array] = []
        for place in self.places:
            arrays = [_with_room(each, room) for each in slots.views(row, place, row.token_count)]
            _put(row, place, arrays)
            copies += arrays
        mx.eval(copies)
        self.drop(row)
        row.note_copied(room)

    def drop(self, row: Row) -> None:
        """Free the slot of a row that ends; its own caches hold what they hold."""
        self._seated.pop(id(row)).remove(row)
        self._shown.discard(id(row))
        row.seated_caches = None
        row.keepers.remove(self)

    def prepare(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Have room for what these rows bring, few gaps, and no view of a buffer left in anyone's caches."""
        everyone = [row for slots in self._slots for row in slots.rows if row is not None]
        for row in everyone if self._shown else ():
            if id(row) in self._shown:
                self._clear(row)
        for row, count in zip(rows, counts, strict=True):
            if id(row) in self._seated and count > self._left(row):
                self._move(row, more=count)
        due = [row for row in rows if id(row) in self._seated and self._outgrows_soon(row)]
        if due:
            # The last one of a buffer leaves no gap.
            row = min(due, key=lambda row: (self._left(row), -self._seated[id(row)].slots[id(row)]))
            self._move(row, more=self._left(row) + 1)
        self._slots = [slots for slots in self._slots if slots.rows]
        for slots in self._slots:
            if slots.run_count > _MOST_RUNS:
                slots.close_gaps()

    def _left(self, row: Row) -> int:
        """Return how many tokens more a row may have where it lies."""
        return min(self._seated[id(row)].length, self.token_limit) - row.token_count

    def _outgrows_soon(self, row: Row) -> bool:
        left = self._left(row)
        return 0 < left <= _EARLY_TOKEN_COUNT and row.length.limit_token_count > row.token_count + left

    def _move(self, row: Row, *, more: int) -> None:
        """Give a row a longer slot, or none where it is to be longer than the rows that have one."""
        if row.token_count + more > self.token_limit:
            self.leave(row, more=more)
            return
        slots = self._seated[id(row)]
        held = {place: slots.views(row, place, row.token_count) for place in self.places}
        self._add(row, held, more=more, slot_count=len(slots.slots))
        slots.remove(row)
        # Others may write to the buffers it was in, and those are read until this is done.
        mx.eval([array for each in self._seated[id(row)].buffers.values() for array in each])

    def key_of(self, row: Row) -> tuple[int, int]:
        """Return where a row lies: sorted by it, the rows of a buffer are in the order of their slots."""
        slots = self._seated.get(id(row))
        return (1 + self._slots.index(slots), slots.slots[id(row)]) if slots is not None else (0, 0)

    def count(self, length: int) -> int:
        """Return how many rows the class of this length has."""
        return sum(len(slots.slots) for slots in self._slots if slots.length == length)

    def runs(self, rows: Sequence[Row]) -> list[tuple[int, int, SlotRun]]:
        """Return which of these singles, sorted by `key_of`, lie side by side: from which to which."""
        found, first = [], 0
        while first < len(rows):
            slots = self._seated.get(id(rows[first]))
            if slots is None:
                first += 1
                continue
            last, slot = first, slots.slots[id(rows[first])]
            while last < len(rows) and slots.slots.get(id(rows[last])) == slot + last - first:
                last += 1
            found.append((first, last, SlotRun(slots, rows[first:last])))
            first = last
        return found

    def arrays(self) -> list[mx.array]:
        """Return every buffer."""
        return [array for slots in self._slots for each in slots.buffers.values() for array in each]

    def _add(self, row: Row, held: Held, *, more: int, slot_count: int = 0) -> None:
        length = row.slot_length(row.token_count + more)
        fitting = (slots for slots in self._slots if slots.length == length and slots.has_room)
        slots = next(fitting, None)
        if slots is None:
            slots = SlotClass(length)
            self._slots.append(slots)
        slots.add(row, held, self._likes, slot_count=min(slot_count, _MOST_SLOTS))
        self._seated[id(row)] = slots
        caches = list(row.raw_caches)
        for place in self.places:
            caches[place] = Seat(slots, row, place)
        row.seated_caches = caches

    def _clear(self, row: Row) -> None:
        for place in self.places:
            cache = row.raw_caches[place]
            cache.keys = cache.values = None
            cache.offset = 0
        self._shown.discard(id(row))
