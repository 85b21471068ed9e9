"""Keys of tokens: text is its ids, a picture is itself and no other, and a run survives being stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.blocks import (
    ImageRun,
    block_hash,
    has_image,
    image_keys,
    join_keys,
    key_hash,
    prefix_key_hashes,
    root_hash,
    runs_of,
    split_keys,
    token_id_of,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, Fingerprint, ImageDigest

ROOT = root_hash(fingerprint=Fingerprint(b"f" * 32), tenant=DEFAULT_TENANT)
CAT, DOG = ImageDigest(b"\x00" * 31 + b"c"), ImageDigest(b"\xff" * 32)
TEXT = (5, 0, 2**32 - 1)


def test_text_is_its_ids_and_has_the_name_it_always_had() -> None:
    assert not has_image(TEXT)
    assert split_keys(TEXT) == (TEXT, b"")
    assert key_hash(parent=ROOT, keys=TEXT) == block_hash(parent=ROOT, token_ids=TEXT)


def test_the_same_ids_with_another_image_or_from_another_place_are_others() -> None:
    ids = (7, 7, 9, 7)
    runs = [ids, image_keys(CAT, ids), image_keys(DOG, ids), image_keys(CAT, ids, place=1)]
    runs += [(7, *image_keys(CAT, ids[1:])), (*image_keys(CAT, ids[:3]), 7)]
    assert all(tuple(token_id_of(key) for key in run) == ids for run in runs)
    assert len({key_hash(parent=ROOT, keys=run) for run in runs}) == len(set(runs)) == len(runs)


def test_one_span_in_two_blocks_and_two_spans_of_one_image_are_distinguished() -> None:
    whole = image_keys(CAT, (7,) * 4)
    twice = (*image_keys(CAT, (7,) * 2), *image_keys(CAT, (7,) * 2))
    assert whole[2:] == image_keys(CAT, (7,) * 2, place=2)
    assert whole != twice and key_hash(parent=ROOT, keys=whole) != key_hash(parent=ROOT, keys=twice)


spans = st.tuples(
    st.sampled_from([None, CAT, DOG]),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
    st.integers(0, 2**31),
)


@given(st.lists(spans, max_size=5))
def test_a_run_comes_back_from_what_is_stored_of_it(parts: list) -> None:
    keys: tuple[int, ...] = ()
    for digest, ids, place in parts:
        keys += tuple(ids) if digest is None else image_keys(digest, ids, place=place)
    token_ids, extra = split_keys(keys)
    assert max(token_ids, default=0) < 2**32
    assert join_keys(token_ids, extra) == keys
    assert bool(extra) == has_image(keys)
    lengths = range(len(keys) + 1)
    names = prefix_key_hashes(parent=ROOT, keys=keys, lengths=lengths)
    assert names == [key_hash(parent=ROOT, keys=keys[:length]) for length in lengths]


@pytest.mark.parametrize("extra", [b"image", split_keys(image_keys(CAT, (1, 2, 3)))[1]])
def test_parts_that_are_none_or_do_not_fit_are_refused(extra: bytes) -> None:
    with pytest.raises(ValueError, match=r"are no parts|are not inside"):
        join_keys((1, 2), extra)


def test_a_run_says_where_its_image_began() -> None:
    keys = (1, *image_keys(CAT, (7, 7), place=5), 2, *image_keys(DOG, (7,)))
    runs = runs_of(split_keys(keys)[1])
    assert runs == (ImageRun(CAT, 1, 5, 2), ImageRun(DOG, 4, 0, 1))
