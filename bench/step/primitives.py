"""Primitives of a graph: how much a pass asks of MLX, whatever the machine's speed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten

_MARK = "shape=rectangle"


def primitive_count(*trees: Any) -> int:
    """Return how many primitives arrays have that were not evaluated yet, each one counted once."""
    leaves: Any = tree_flatten(list(trees))
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    graph = io.StringIO()
    if arrays:
        mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count(_MARK)


@contextlib.contextmanager
def counted_primitives() -> Iterator[list[int]]:
    """Yield a list that gets the number of primitives of each evaluation meanwhile, empty ones left out."""
    found: list[int] = []

    def noting(name: str) -> Any:
        really = getattr(mx, name)

        def run(*trees: Any) -> Any:
            count = primitive_count(*trees)
            if count:
                found.append(count)
            return really(*trees)

        return run

    with patch.object(mx, "eval", noting("eval")), patch.object(mx, "async_eval", noting("async_eval")):
        yield found
