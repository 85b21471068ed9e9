"""Length classes: never too short, at most half as long again from 256 on, and few."""

from __future__ import annotations

from icehouse_server.engine.core.length_class import length_class


def test_a_class_holds_its_tokens_and_wastes_little() -> None:
    for count in range(1, 5000):
        length = length_class(count)
        assert length >= count
        assert length % 128 == 0
        assert count <= 256 or length <= 1.5 * count + 1


def test_classes_are_few() -> None:
    assert sorted({length_class(count) for count in range(1, 2049)}) == [
        128,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
    ]
