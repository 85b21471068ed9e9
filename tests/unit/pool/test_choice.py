"""Who gives way for a model, by tables."""

from __future__ import annotations

import pytest
from icehouse_server.errors import CannotFit, Reason
from icehouse_server.pool.places import LoadedPlace, ModelNeeds, ModelTerms, yielding


def occupant(
    name: str, size_bytes: int, *, runs: int = 0, users: int = 0, used: float = 0.0, pinned: bool = False
) -> LoadedPlace:
    terms, opened = ModelTerms(name, is_pinned=pinned), object()
    return LoadedPlace(terms, opened, ModelNeeds(size_bytes, runs), used, users)  # type: ignore[arg-type]


IDLE_OLD = occupant("idle-old", 40, used=1.0)
IDLE_NEW = occupant("idle-new", 30, used=2.0)
BUSY_OLD = occupant("busy-old", 40, users=1, used=0.5)
BUSY_NEW = occupant("busy-new", 20, users=3, used=3.0)
PINNED = occupant("pinned", 30, pinned=True)
LARGE = occupant("large", 100, used=5.0)


@pytest.mark.parametrize(
    ("size_bytes", "occupants", "wanted"),
    [
        (10, [], []),
        (100, [], []),
        (60, [IDLE_OLD], []),
        (61, [IDLE_OLD], ["idle-old"]),
        # The least recently used first, and no more than are needed.
        (50, [IDLE_NEW, IDLE_OLD], ["idle-old"]),
        (71, [IDLE_NEW, IDLE_OLD], ["idle-old", "idle-new"]),
        # Idle ones before running ones, however long ago those were used.
        (20, [BUSY_OLD, IDLE_OLD, BUSY_NEW], ["idle-old"]),
        (61, [BUSY_OLD, IDLE_OLD, BUSY_NEW], ["idle-old", "busy-old"]),
        (100, [BUSY_OLD, IDLE_OLD, BUSY_NEW], ["idle-old", "busy-old", "busy-new"]),
        # Pinned ones never.
        (30, [PINNED, IDLE_OLD], []),
        (50, [PINNED, IDLE_OLD], ["idle-old"]),
        (70, [PINNED, IDLE_OLD], ["idle-old"]),
        # One that is not needed any more stays.
        (50, [LARGE, occupant("small", 1, used=0.1)], ["large"]),
    ],
)
def test_who_gives_way(size_bytes: int, occupants: list[LoadedPlace], wanted: list[str]) -> None:
    chosen = yielding("new", ModelNeeds(size_bytes), occupants, limit_bytes=100)
    assert [each.terms.name for each in chosen] == wanted


@pytest.mark.parametrize(("size_bytes", "occupants"), [(101, []), (71, [PINNED]), (71, [PINNED, IDLE_OLD])])
def test_what_cannot_fit_is_refused_with_the_numbers(size_bytes: int, occupants: list[LoadedPlace]) -> None:
    with pytest.raises(CannotFit) as caught:
        yielding("new", ModelNeeds(size_bytes), occupants, limit_bytes=100)
    assert caught.value.reason is Reason.MEMORY_NEVER_FITS
    told = caught.value.metadata
    assert (told["model"], told["weight_bytes"], told["limit_bytes"]) == ("new", str(size_bytes), "100")
    assert told["pinned_bytes"] == ("30" if PINNED in occupants else "0")


@pytest.mark.parametrize(
    ("run_bytes", "occupants", "wanted"),
    [
        # There must be room for any of them to run, but not for all at once: idle ones give back the rest.
        (30, [IDLE_OLD], []),
        (31, [IDLE_OLD], ["idle-old"]),
        (0, [occupant("runs", 40, runs=30)], []),
        (0, [occupant("runs", 40, runs=31)], ["runs"]),
        (30, [occupant("runs", 40, runs=30)], []),
        (20, [occupant("runs", 20, runs=40, used=2.0), occupant("old", 20, used=1.0)], ["old"]),
    ],
)
def test_what_is_loaded_can_also_run(run_bytes: int, occupants: list[LoadedPlace], wanted: list[str]) -> None:
    chosen = yielding("new", ModelNeeds(30, run_bytes), occupants, limit_bytes=100)
    assert [each.terms.name for each in chosen] == wanted


@pytest.mark.parametrize(
    ("run_bytes", "occupants"),
    [(71, []), (41, [PINNED]), (0, [occupant("pinned", 30, runs=41, pinned=True)])],
)
def test_what_could_never_run_is_refused_before_it_is_loaded(
    run_bytes: int, occupants: list[LoadedPlace]
) -> None:
    with pytest.raises(CannotFit) as caught:
        yielding("new", ModelNeeds(30, run_bytes), occupants, limit_bytes=100)
    assert caught.value.metadata["run_bytes"] == ("71" if not occupants else "41")


def test_the_refusal_has_sizes_for_people_and_speaks_of_pinned_models_where_there_are_some() -> None:
    gib = 1 << 30
    for occupants, is_told in (([], False), ([occupant("pinned", 2 * gib, pinned=True)], True)):
        with pytest.raises(CannotFit, match=r"takes 3\.0 GiB .* may use 4\.0 GiB") as caught:
            yielding("new", ModelNeeds(3 * gib, 2 * gib), occupants, limit_bytes=4 * gib)
        assert ("pin" in caught.value.message) == is_told
