"""A slab is tried on passes that are measured, kept where it is cheaper, and measured again later."""

from __future__ import annotations

from icehouse_server.engine.runner.slab_choice import SlabChoice


def passes(choice: SlabChoice, lengths: list[int], *, row_s: float, slab_s: float, count: int) -> list[bool]:
    """Run passes that take so long either way; return where each one attended."""
    found = []
    for _ in range(count):
        in_slab = choice.prefers_slab(lengths)
        choice.note(lengths, slab_s if in_slab else row_s, in_slab=in_slab)
        found.append(in_slab)
    return found


def test_both_ways_are_measured_and_the_cheaper_one_is_kept() -> None:
    for slab_s, is_kept in ((0.03, True), (0.05, False)):
        found = passes(SlabChoice(), [40] * 9, row_s=0.04, slab_s=slab_s, count=50)
        assert not found[0], "a slab costs a copy: rows are measured first"
        assert any(found) and not all(found)
        assert set(found[-30:]) == {is_kept}


def test_a_slab_that_saves_next_to_nothing_is_not_worth_its_copies() -> None:
    assert set(passes(SlabChoice(), [40] * 9, row_s=0.04, slab_s=0.039, count=50)[-30:]) == {False}


def test_a_few_rows_share_nothing() -> None:
    assert not any(passes(SlabChoice(), [40] * 3, row_s=0.04, slab_s=0.001, count=50))
    assert any(passes(SlabChoice(), [40] * 4, row_s=0.04, slab_s=0.001, count=50))


def test_more_rows_of_a_length_follow_fewer_until_they_are_measured() -> None:
    choice = SlabChoice()
    passes(choice, [40] * 9, row_s=0.04, slab_s=0.02, count=20)
    assert choice.prefers_slab([40] * 16)
    assert not choice.prefers_slab([4000] * 16), "another length"
    assert not choice.prefers_slab([40] * 7)
    passes(choice, [40] * 16, row_s=0.04, slab_s=0.05, count=5000)
    assert not choice.prefers_slab([40] * 16)
    assert choice.prefers_slab([40] * 9)


def test_an_early_sample_does_not_decide_for_ever() -> None:
    choice = SlabChoice()
    passes(choice, [40] * 9, row_s=0.04, slab_s=0.08, count=20)
    assert not choice.prefers_slab([40] * 9)
    found = passes(choice, [40] * 9, row_s=0.04, slab_s=0.02, count=12000)
    assert set(found[-30:]) == {True}


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    assert not any(passes(SlabChoice(), [40] * 9, row_s=0.0, slab_s=0.0, count=50))
