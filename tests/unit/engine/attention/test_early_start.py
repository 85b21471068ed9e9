"""A pass that nothing runs before is given to the device while it is built."""

from __future__ import annotations

import mlx.core as mx
import pytest
from icehouse_server.engine.attention.early_start import EarlyStart


def given_counts(monkeypatch: pytest.MonkeyPatch, early: EarlyStart, layer_count: int) -> list[int]:
    """Return before which of so many layers something was given to the device."""
    found: list[int] = []
    layers = iter(range(1, layer_count + 1))
    number = 0
    really = mx.async_eval

    def noting(*arrays: mx.array) -> None:
        found.append(number)
        really(*arrays)

    monkeypatch.setattr(mx, "async_eval", noting)
    for number in layers:
        early.note_layer(mx.zeros(1))
    return found


def test_every_few_layers_are_given_while_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    early = EarlyStart()
    assert given_counts(monkeypatch, early, 13) == []
    early.begin()
    assert given_counts(monkeypatch, early, 13) == [6, 12]
    early.end()
    assert given_counts(monkeypatch, early, 13) == []
