"""Slices of a tower: pieces give what the whole gives, and a step takes as many as it has room for."""

from __future__ import annotations

import collections

import mlx.core as mx
import pytest
from icehouse_server.engine.runner.vision.slices import TowerPace, TowerSlice, TowerSlicer
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

WIDTH, HEAD_COUNT, COUNT = 64, 4, 48


class Tower(Module):
    """A layer of attention and a half that reads tokens, which is not the tower's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.qkv = Linear(WIDTH, 3 * WIDTH)
        self.out = Linear(WIDTH, WIDTH).to_quantized()
        self.language_model = Linear(WIDTH, WIDTH)

    def __call__(self, hidden: mx.array, mask: mx.array | str | None = None) -> mx.array:
        batch, count, _ = hidden.shape
        parts = self.qkv(hidden).reshape(batch, count, 3, HEAD_COUNT, -1).transpose(2, 0, 3, 1, 4)
        seen = mx.fast.scaled_dot_product_attention(*parts, scale=0.25, mask=mask)
        found: mx.array = self.language_model(self.out(seen.transpose(0, 2, 1, 3).reshape(batch, count, -1)))
        return found


def masks() -> dict[str, mx.array | str | None]:
    below = mx.tril(mx.ones((COUNT, COUNT), mx.bool_))
    return {"none": None, "rows": below, "keys": below[None, None, -8:-7], "causal": "causal"}


@pytest.mark.parametrize("mask", masks())
def test_pieces_give_what_the_whole_gives(mask: str) -> None:
    tower, hidden = Tower(), mx.random.normal((2, COUNT, WIDTH), key=mx.random.key(1))
    expected = tower(hidden, masks()[mask])
    upstream = mx.fast.scaled_dot_product_attention
    with TowerSlicer(tower, piece_work=1).slicing() as slices:
        found = tower(hidden, masks()[mask])
    assert mx.allclose(found, expected, atol=1e-5).item()
    kinds = collections.Counter(piece.kind for piece in slices)
    attention = 0 if mask == "causal" else COUNT // 16
    assert kinds == {"linear": 2 * COUNT // 16, **({"attention": attention} if attention else {})}
    assert mx.fast.scaled_dot_product_attention is upstream
    assert mx.allclose(tower(hidden, masks()[mask]), expected, atol=1e-5).item(), "as before outside of it"


def test_a_piece_is_no_larger_than_its_limit() -> None:
    tower, hidden = Tower(), mx.random.normal((1, COUNT, WIDTH), key=mx.random.key(1))
    limit = COUNT * WIDTH * WIDTH
    with TowerSlicer(tower, piece_work=limit).slicing() as slices:
        tower(hidden)
    kinds = collections.Counter(piece.kind for piece in slices)
    assert kinds == {"linear": 3 + 1, "attention": 2}
    assert all(piece.work <= limit * (1 + 1 / 64) for piece in slices)


def test_what_fails_inside_leaves_attention_as_it_was() -> None:
    upstream = mx.fast.scaled_dot_product_attention
    with pytest.raises(ValueError, match="broken"), TowerSlicer(Tower()).slicing():
        raise ValueError("broken")
    assert mx.fast.scaled_dot_product_attention is upstream


def pieces(*works: float, kind: str = "linear") -> collections.deque[TowerSlice]:
    return collections.deque(TowerSlice(mx.array(0.0), kind, work) for work in works)


def test_a_step_takes_what_it_is_expected_to_have_time_for() -> None:
    pace, waiting = TowerPace(), pieces(10, 10, 10, 10, 40, 10)
    taken = pace.take(waiting, left_s=9.0, may_wait=False)
    assert len(taken) == 1, "nothing is known of them"
    pace.note(taken, 1.0)
    assert len(pace.take(waiting, left_s=3.5, may_wait=True)) == 3
    assert pace.take(waiting, left_s=3.5, may_wait=True) == [], "the next one would take 4 s"
    assert len(pace.take(waiting, left_s=0.0, may_wait=False)) == 1, "or nothing ever came of it"
    assert len(pace.take(waiting, left_s=3.5, may_wait=True)) == 1 and not waiting


def test_expectations_follow_what_was_measured_kind_by_kind() -> None:
    pace = TowerPace()
    pace.note(list(pieces(10)), 1.0)
    assert pace.take(pieces(10, kind="attention"), left_s=0.1, may_wait=True), "nobody knows how long"
    mixed = [*pieces(10), *pieces(10, kind="attention")]
    pace.note(mixed[1:], 3.0)
    pace.note(mixed, 8.0)
    for kind, expected_s in (("linear", 2.0), ("attention", 6.0)):
        assert not pace.take(pieces(10, kind=kind), left_s=expected_s - 0.1, may_wait=True)
        assert pace.take(pieces(10, kind=kind), left_s=expected_s + 0.1, may_wait=True)
