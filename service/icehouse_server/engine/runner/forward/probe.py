"""Probe of a model: finds the best split of its rows by running them together and alone and comparing.

A few short rows take passes of chunks, single tokens and windows of guesses side by side; each is also run
alone through the model's own call. The best split whose outputs agree is chosen. How far outputs may differ
is measured on the model, by running the same tokens in chunks and one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

import mlx.core as mx

from icehouse_server.engine.kv_cache import cache_classes
from icehouse_server.engine.kv_cache.cache_classes import leaves
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.joined_layers import JoinedLayers
from icehouse_server.engine.runner.forward.model_seam import Trunk
from icehouse_server.engine.runner.forward.row import LayeredChunk, Row, Share, can_take_back
from icehouse_server.engine.runner.forward.splits import NotSplittable, PassFacts, candidates

_log = logging.getLogger("icehouse.engine")

JoinSteps = Callable[[Any], Generator[None, None, JoinedLayers]]
Schedule = Sequence[Sequence[int]]
"""For each pass, how many tokens each row adds; 0 for a row that is not in it."""

_SCHEDULE: Final[Schedule] = ((5, 3, 0), (1, 6, 2), (1, 1, 1), (1, 3, 1), (1, 1, 1))
_LEAST_TOLERANCE: Final = 1e-3
_MOST_TOLERANCE: Final = 0.1


def examine_steps(
    model: Any,
    *,
    make_caches: Callable[[], list[Any]] | None = None,
    schedule: Schedule = _SCHEDULE,
    goes_layered: bool = True,
    join: JoinSteps | None = None,
) -> Generator[None, None, PassFacts]:
    """Return how passes of this model are run. Raises what the model raises when called by itself.

    Yields between passes, so that other models can run theirs.

    `make_caches` makes the caches that rows will have, if these are not the model's own. `schedule` is for
    tests, whose windows are short. `goes_layered`: also find out whether chunks may go through a few layers
    in each pass, which is of no use to a device that runs ahead. `join`: join layers of the model, if its
    outputs then stay the same.
    """
    make = make_caches or functools.partial(cache_classes.make_caches, model)
    reference = yield from _Reference.steps(model, make, schedule)
    is_joined = False
    if join is not None:
        is_joined = yield from _join(model, join, make, reference)
    caches = make()
    alone = PassFacts(
        caches=(),
        hidden_size=_hidden_size(model, make, reference),
        can_take_back=can_take_back(caches),
        layers_are_joined=is_joined,
    )
    yield
    errors: dict[str, None] = {}
    for splits in candidates(caches):
        facts = dataclasses.replace(alone, caches=splits, reason="; ".join(errors))
        error = yield from _try(model, facts, make, reference)
        if not error:
            count = (yield from _layer_count(model, facts, make, reference)) if goes_layered else 0
            return dataclasses.replace(facts, layer_count=count)
        errors[error] = None
    return dataclasses.replace(alone, reason="; ".join(errors))


@dataclasses.dataclass(frozen=True, slots=True)
class _Reference:
    """What the rows give alone, and how far that changes when the same tokens are run in another way."""

    schedule: Schedule
    logits: list[list[mx.array]]
    """For each pass and each row in it, [tokens, vocabulary]."""
    facts: list[list[tuple[Any, ...]]]
    """After each pass, each row's caches as `_facts_of` describes them."""
    tolerance: float

    @classmethod
    def steps(
        cls, model: Any, make: Callable[[], list[Any]], schedule: Schedule
    ) -> Generator[None, None, _Reference]:
        rows = [make() for _ in schedule[0]]
        begun = [0] * len(rows)
        logits, facts = [], []
        for counts in schedule:
            outputs = []
            for number, count in enumerate(counts):
                if count:
                    ids = mx.array(_tokens(number, begun[number], count))
                    outputs.append(model(ids[None], cache=rows[number])[0])
                    begun[number] += count
                    mx.eval(outputs[-1])
                    yield
            logits.append(outputs)
            facts.append([_facts_of(row) for row in rows])
        caches = make()
        singly = []
        for token in _tokens(0, 0, schedule[0][0]):
            singly.append(model(mx.array([[token]]), cache=caches)[0])
            mx.eval(singly[-1])
            yield
        moved = _distance(mx.concatenate(singly), logits[0][0])
        tolerance = min(_MOST_TOLERANCE, max(_LEAST_TOLERANCE, 4 * moved))
        return cls(schedule, logits, facts, tolerance)

    def passes(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each pass and how many tokens the rows hold before it."""
        begun = [0] * len(self.schedule[0])
        for number, counts in enumerate(self.schedule):
            yield number, tuple(begun)
            begun = [have + count for have, count in zip(begun, counts, strict=True)]


def _join(
    model: Any, join: JoinSteps, make: Callable[[], list[Any]], reference: _Reference
) -> Generator[None, None, bool]:
    """Join layers, and separate them again if the model's outputs change; return whether they stay joined."""
    joined = yield from join(model)
    after = yield from _Reference.steps(model, make, reference.schedule)
    both = zip(itertools.chain(*after.logits), itertools.chain(*reference.logits), strict=True)
    moved = max(itertools.starmap(_distance, both))
    if not moved <= reference.tolerance:
        joined.separate()
        _log.warning("layers_not_joined", extra={"detail": f"outputs differ by {moved:.2g} of their size"})
        return False
    if len(joined):
        _log.info("layers_joined", extra={"product_count": len(joined)})
    return True


def _try(
    model: Any, facts: PassFacts, make: Callable[[], list[Any]], reference: _Reference
) -> Generator[None, None, str]:
    """Run the schedule with this split; return what is wrong with it, "" if nothing is."""
    try:
        forward = ForwardPass(model, facts)
        rows = [Row(make()) for _ in reference.schedule[0]]
        for number, begun in reference.passes():
            counts = reference.schedule[number]
            chunks: list[LayeredChunk] = []
            for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
                if count > 1 and facts.layer_count:
                    chunk = yield from _begun_chunk(forward, row, _tokens(i, begun[i], count))
                    chunks.append(chunk)
            layered = {id(chunk.row) for chunk in chunks}
            flat = [i for i, count in enumerate(counts) if count and id(rows[i]) not in layered]
            shares = [Share(rows[i], counts[i], logit_count=counts[i]) for i in flat]
            if shares:
                ids = [t for i in flat for t in _tokens(i, begun[i], counts[i])]
                output = forward.run(mx.array(ids), shares)
                mx.eval(output.arrays)
                assert output.logits is not None
                # Rows in this pass, in the order that the reference has them.
                here = [i for i, count in enumerate(counts) if count]
                for (first, last), i in zip(output.logit_spans, flat, strict=True):
                    moved = _distance(output.logits[first:last], reference.logits[number][here.index(i)])
                    if not moved <= reference.tolerance:
                        return f"outputs differ by {moved:.2g} of their size"
                yield
            for chunk in chunks:
                mx.eval(forward.run_layers(chunk, facts.layer_count))
                yield
            if [_facts_of(row.caches) for row in rows] != reference.facts[number]:
                return "caches hold something else than a row's alone"
    except Exception as error:  # whatever a model makes of caches that it does not know
        text = " ".join(str(error).split())
        return text if isinstance(error, NotSplittable) else f"{type(error).__name__}: {text[:160]}"
    return ""


def _begun_chunk(
    forward: ForwardPass, row: Row, token_ids: Sequence[int]
) -> Generator[None, None, LayeredChunk]:
    """Return a chunk that is through some layers, after dropping one at the same point."""
    for _ in range(2):
        chunk = forward.begin_layers(row, token_ids)
        for last in (1, forward.facts.layer_count // 2):
            if last > chunk.layer:
                mx.eval(forward.run_layers(chunk, last))
        yield
    return chunk


def _layer_count(
    model: Any, facts: PassFacts, make: Callable[[], list[Any]], reference: _Reference
) -> Generator[None, None, int]:
    """Return through how many layers a chunk may go a few at a time; 0 if all must run together."""
    count = len(model.layers)
    if count < 2:
        return 0
    error = yield from _try(model, dataclasses.replace(facts, layer_count=count), make, reference)
    if error:
        _log.info("layers_run_together", extra={"detail": error})
    return 0 if error else count


def _facts_of(caches: Sequence[Any]) -> tuple[Any, ...]:
    """Return what can be known of caches without reading arrays: offsets, and which arrays there are."""
    return tuple(
        (type(leaf).__name__, getattr(leaf, "offset", None), leaf.empty()) for leaf in leaves(caches)
    )


def _tokens(row: int, start: int, count: int) -> list[int]:
    """Return tokens of a row from a position on: small ids, which every vocabulary has."""
    return [3 + (7 * at + 11 * row + at * at) % 40 for at in range(start, start + count)]


def _distance(ours: mx.array, alone: mx.array) -> float:
    """Return a token's largest difference of outputs, relative to their size; infinities must agree."""
    ours, alone = ours.astype(mx.float32), alone.astype(mx.float32)
    if ours.shape != alone.shape:
        return float("inf")
    size = mx.maximum(mx.sqrt((_finite(alone) ** 2).mean(axis=-1)), 1e-6)
    moved = mx.sqrt(((_finite(ours) - _finite(alone)) ** 2).mean(axis=-1)) / size
    agrees = mx.array_equal(mx.isfinite(ours), mx.isfinite(alone))
    largest: Any = mx.where(agrees, moved.max(), float("inf")).item()
    return float(largest)


def _finite(array: mx.array) -> mx.array:
    return mx.where(mx.isfinite(array), array, 0.0)


def _hidden_size(model: Any, make: Callable[[], list[Any]], reference: _Reference) -> int:
    """Return the width of the hidden states; 0 if there are none, or if the head must read all of them."""
    count = reference.schedule[0][0]
    try:
        trunk = Trunk(model)
    except LookupError:
        return 0
    trunk.is_on, trunk.indices = True, mx.array([1, count - 1])
    try:
        picked = model(mx.array(_tokens(0, 0, count))[None], cache=make())[0]
        moved = _distance(picked, reference.logits[0][0][trunk.indices])
        hidden = trunk.hidden
        if hidden is None or hidden.shape[:2] != (1, count) or not moved <= reference.tolerance:
            return 0
        return int(hidden.shape[-1])
    except Exception as error:  # whatever a head does that is called in an unusual way
        _log.info("head_reads_all", extra={"detail": f"{type(error).__name__}: {str(error)[:160]}"})
        return 0
    finally:
        trunk.is_on, trunk.indices, trunk.hidden = False, None, None
