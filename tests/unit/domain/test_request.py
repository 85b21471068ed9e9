"""Requests' ids, and where images are a grid: three positions a token, as Qwen2-VL lays a prompt out."""

from __future__ import annotations

import itertools

import pytest
from icehouse_server.domain.ids import ImageDigest, Tenant
from icehouse_server.domain.request import (
    ImageInput,
    ImageSpan,
    RopePositions,
    call_of,
    name_of,
    part_of,
    request_id_of,
)

TENANTS = ("", "a", "a@b", "@", "#1", "a#1", "#1@a", "r")


def span(start: int, frames: int, rows: int, columns: int) -> ImageSpan:
    count = frames * rows * columns
    image = ImageInput(ImageDigest(b"i" * 32), (), count, (frames, rows, columns))
    return ImageSpan(start, start + count, image)


def test_text_goes_on_behind_the_longest_side_of_an_image() -> None:
    laid = RopePositions.of(12, [span(2, 1, 2, 3), span(9, 1, 1, 1)])
    assert laid is not None
    assert laid.of_prompt.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert laid.shift == -3
    assert laid.at(11, 3).tolist() == [[8, 9, 10]] * 3
    assert laid.at(20, 1).tolist() == [[17]] * 3
    assert laid.at(7, 1).tolist() == [[2], [3], [4]]


def test_a_prompt_without_a_grid_has_the_positions_of_the_sequence() -> None:
    plain = ImageSpan(0, 2, ImageInput(ImageDigest(b"i" * 32), (), 2))
    assert RopePositions.of(5, []) is None and RopePositions.of(5, [plain]) is None


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_part_is_of_its_call_and_has_its_callers_name(tenant: str) -> None:
    call = request_id_of("r", Tenant(tenant))
    assert [name_of(part_of(call, index)) for index in range(3)] == ["r", "r#1", "r#2"]
    assert {call_of(part_of(call, index)) for index in range(3)} == {call}


def test_no_two_are_alike() -> None:
    parts = [
        part_of(request_id_of(name, Tenant(tenant)), index)
        for name, tenant, index in itertools.product(("r", "r.1", "a"), TENANTS, range(3))
    ]
    assert len(set(parts)) == len(parts)
