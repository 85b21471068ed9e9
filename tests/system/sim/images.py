"""Images of the simulation: all have the same token, so that only their digests tell them apart."""

from __future__ import annotations

import random
from collections.abc import Sequence

from icehouse_server.domain.blocks import TokenKeys, has_image, image_keys, image_runs, token_id_of
from icehouse_server.domain.ids import ImageDigest
from icehouse_server.domain.request import ImageInput, ImageSpan

from tests.system.sim.model import ALPHABET, visible

_TOKEN_ID = ord("i")
_LENGTHS = (3, 6, 6, 6, 9)
_IMAGES = [
    ImageInput(ImageDigest(bytes([number + 1]) * 32), (), length, is_seen_whole=number % 2 == 1)
    for number, length in enumerate(_LENGTHS)
]
IMAGES = {image.digest: image for image in _IMAGES}
"""Some have equal token counts, some more than a block; some must not be split over passes."""


def drawn_image(dice: random.Random) -> TokenKeys:
    """Return the keys of one of them."""
    image = dice.choice(list(IMAGES.values()))
    return image_keys(image.digest, (_TOKEN_ID,) * image.feature_count)


def untorn(keys: TokenKeys) -> TokenKeys:
    """Return a prompt's keys without an incomplete image at the end."""
    runs = list(image_runs(keys))
    if not runs or runs[-1].start + runs[-1].token_count < len(keys):
        return keys
    last = runs[-1]
    is_whole = last.place + last.token_count == IMAGES[ImageDigest(last.digest)].feature_count
    return keys if is_whole else keys[: last.start]


def closed(keys: TokenKeys, *, limit: int) -> TokenKeys:
    """Return a prompt's keys with text after a last image that is seen whole, as templates write it; without
    the image if the text does not fit."""
    if not has_image(keys[-1:]):
        return keys
    *_, last = image_runs(keys)
    if not IMAGES[ImageDigest(last.digest)].is_seen_whole:
        return keys
    return (*keys, ALPHABET[0]) if len(keys) < limit else keys[: last.start]


def ids_and_spans(keys: TokenKeys) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Return a prompt as requests have it."""
    spans = (
        ImageSpan(run.start, run.start + run.token_count, IMAGES[ImageDigest(run.digest)])
        for run in image_runs(keys)
    )
    return tuple(map(token_id_of, keys)), tuple(spans)


def vectors_of(image: ImageInput) -> list[int]:
    """Return an image's vectors as from the tower: the model's input in place of its tokens."""
    return [visible(key) for key in image_keys(image.digest, (_TOKEN_ID,) * image.feature_count)]


def image_token_count(keys: Sequence[int]) -> int:
    """Return how many of these tokens are of images."""
    return sum(has_image((key,)) for key in keys)


def words(keys: Sequence[int]) -> str:
    """Return a prompt for the log: text as it is, images as the first byte of their digests."""
    text = bytes(map(token_id_of, keys)).decode()
    return f"{text!r} {[(run.start, run.digest[0]) for run in image_runs(keys)]}"
