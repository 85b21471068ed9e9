"""A pass that nothing runs before is given to the device while it is built."""

from __future__ import annotations

import mlx.core as mx
import pytest
from icehouse_server.engine.attention.build_hooks import EarlyStart

from tests.fixtures.engine import FakeClock


def given(monkeypatch: pytest.MonkeyPatch, early: EarlyStart, clock: FakeClock) -> list[int]:
    """Return which of 13 layers, a second apart, were given to the device."""
    found: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", found.append)
    for number in range(1, 14):
        clock.now += 1.0
        early.note_layer(mx.array(number))
    return [int(array) for array in found]


def test_every_few_layers_are_given_to_a_device_that_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early, clock = EarlyStart(), FakeClock()
    assert given(monkeypatch, early, clock) == []
    early.begin(clock)
    began_time = clock.now
    assert given(monkeypatch, early, clock) == [6, 12]
    assert early.end() == began_time + 6.0
    assert given(monkeypatch, early, clock) == []


def test_a_pass_of_few_layers_is_given_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    early, clock = EarlyStart(), FakeClock()
    early.begin(clock)
    early.note_layer(mx.zeros(1))
    assert early.end() is None
