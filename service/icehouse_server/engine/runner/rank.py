"""Rank: a model runner's part of a model that is sharded over a group of machines (inference thread).

Each rank computes its share of every layer and adds it to the others'. So all ranks must run the same passes
in the same order, on the same tokens; the tokens drawn are rank 0's.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from icehouse_server.engine.core.refusals import rank_lost
from icehouse_server.engine.runner.forward.sharded_adapters import TakenAdapters
from icehouse_server.errors import ModelError, model_invalid

_JOIN_S = 30.0
"""How long joining may take: all ranks join at the same time, once each has said that it will."""
_CHECK_INTERVAL = 64
_DEVIATION_LIMIT = 0.02
"""Devices of one kind round alike, but those of different generations need not."""
_LEAST = 1e-30
"""The divisor if all logits are 0."""

Group = Any
"""mx.distributed.Group, which mlx's type hints do not name."""


class Rank:
    """One rank. `join` waits for the others, so call it once all are there."""

    def __init__(self, named_ranks: Callable[[], AbstractContextManager[str]]) -> None:
        """Inside `named_ranks` MLX knows who the ranks are; it yields which of its backends connects them."""
        self._named_ranks = named_ranks
        self._group: Group = None

    @property
    def world(self) -> int:
        """Number of ranks; after `join`."""
        return int(self._group.size())

    @property
    def is_first(self) -> bool:
        return int(self._group.rank()) == 0

    def join(self) -> None:
        """Connect with the other ranks. Ends the process if that takes too long; raises Unavailable if MLX
        cannot connect."""
        # If a rank dies meanwhile, MLX waits for ever and holds the interpreter's lock, so no signal or
        # thread of ours would run. This timer needs no lock.
        faulthandler.dump_traceback_later(_JOIN_S, exit=True)
        try:
            with self._named_ranks() as backend:
                self._group = mx.distributed.init(strict=True, backend=backend)
        except RuntimeError as error:
            raise rank_lost(f"MLX cannot connect the ranks: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()

    def shard(self, model: Any, *, given: Mapping[str, mx.array] | None = None) -> int:
        """Keep this rank's share of a model whose weights are not read yet; return the parameter count of the
        whole model. Raises ModelError, or ValueError for a LoRA layer.

        `given` are arrays of a share that was loaded before, by their names without an adapter.
        """
        if not hasattr(model, "shard"):
            raise model_invalid(
                f"mlx-lm cannot shard this model: {type(model).__module__} has no `shard`; serve it on one "
                "machine"
            )
        whole_count = _size(model)
        adapters = TakenAdapters(model)
        before, counts = _size(model), _counts(model)
        try:
            model.shard(self._group)
        except (ValueError, ZeroDivisionError, AssertionError) as error:
            raise self._indivisible(" ".join(str(error).split())) from error
        if _size(model) >= before:
            raise model_invalid("mlx-lm shards no weight of this model; serve it on one machine")
        # mlx-lm rounds down if a count of heads is not a multiple, and the rest would be lost.
        for place, count in _counts(model).items():
            whole = counts.get(place, count)
            is_repeated = count == 1 and whole and self.world % whole == 0
            if count != whole and count * self.world != whole and not is_repeated:
                raise self._indivisible(f"{place} is {whole}")
        rows = adapters.uncount(model)
        model.update(tree_unflatten(list((given or {}).items())))
        adapters.put_back(model, rows, self._group)
        return whole_count

    def _indivisible(self, detail: str) -> ModelError:
        return model_invalid(
            f"this model cannot be sharded over {self.world} ranks: {detail}; its heads and widths must be "
            "multiples of that"
        )

    def is_checked(self, number: int) -> bool:
        """Whether the ranks compare their results in the pass with this number."""
        return number % _CHECK_INTERVAL == 0

    def deviation(self, logits: mx.array) -> mx.array:
        """Return how far this rank's logits, [rows, vocabulary], are from the mean over all ranks, as a share
        of it. Their mean absolute value stands for them. NaN and infinite logits are one caller's problem and
        do not count."""
        wide = logits.astype(mx.float32)
        own = mx.where(mx.isfinite(wide), mx.abs(wide), 0.0).mean()
        mean = mx.distributed.all_sum(own, group=self._group) / self.world
        return mx.abs(own - mean) / mx.maximum(mean, _LEAST)

    def check(self, deviation: mx.array) -> None:
        """Raise Unavailable if this rank computed something else than the others."""
        share = float(np.array(deviation))
        if not share <= _DEVIATION_LIMIT:
            raise rank_lost(f"the ranks' logits differ by {share:.3f} of their size")

    def share(self, token_ids: mx.array) -> mx.array:
        """Return the tokens that rank 0 drew, [count]."""
        own = token_ids if self.is_first else mx.zeros_like(token_ids)
        return mx.distributed.all_sum(own, group=self._group)


def _size(model: Any) -> int:
    """Return how many numbers a model's weights hold."""
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return sum(array.size for _, array in weights)


def _counts(model: Any) -> dict[str, int]:
    """Return the integers that a model's modules have, such as head counts, by their paths."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
