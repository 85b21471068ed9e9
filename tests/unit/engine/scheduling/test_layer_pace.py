"""What rows and layers take is told apart by passes with more layers and with fewer."""

from __future__ import annotations

import itertools

import pytest
from icehouse_server.engine.scheduling.layer_pace import LayerPace

ROWS_S, LAYER_S = 0.03, 0.005


def noted(pace: LayerPace, layer_counts: list[int], *, rows: float = 1.0, layers: float = 1.0) -> LayerPace:
    for count in layer_counts:
        pace.note(ROWS_S, LAYER_S * count, rows * ROWS_S + layers * LAYER_S * count)
    return pace


@pytest.mark.parametrize(("rows", "layers"), [(1.0, 1.0), (1.4, 1.0), (1.0, 1.6), (1.3, 0.8)])
def test_what_both_take_is_found(rows: float, layers: float) -> None:
    pace = noted(LayerPace(), [1, 4, 2, 6] * 3, rows=rows, layers=layers)
    assert pace.rows == pytest.approx(rows, rel=0.1)
    assert pace.layers == pytest.approx(layers, rel=0.2)


def test_rows_that_are_slower_than_known_are_not_taken_for_dear_layers() -> None:
    pace = noted(LayerPace(), [1] * 40, rows=1.3)
    assert pace.rows == pytest.approx(1.3, rel=0.05) and 1.0 <= pace.layers < 1.2


def test_one_pass_that_others_made_long_says_next_to_nothing() -> None:
    pace = noted(LayerPace(), [2] * 6)
    pace.note(ROWS_S, 2 * LAYER_S, 30 * ROWS_S)
    assert pace.rows < 1.2 and pace.layers < 1.2


def test_once_rows_run_alone_theirs_is_forgotten_and_the_layers_by_half() -> None:
    pace = noted(LayerPace(), [1, 4, 2, 6] * 3, rows=1.5, layers=2.0)
    dear = pace.layers
    for _ in range(2):
        pace.note_rows_alone()
    assert pace.rows == 1.0 and pace.layers == pytest.approx((1.0 + dear) / 2.0)


def test_factors_stay_within_bounds_whatever_was_measured() -> None:
    for rows_s, layers_s, elapsed_s in itertools.product((1e-9, 1.0, 100.0), repeat=3):
        pace = LayerPace()
        for _ in range(20):
            pace.note(rows_s, layers_s, elapsed_s)
            assert 0.7 <= pace.rows <= 2.0 and 0.7 <= pace.layers <= 3.0
