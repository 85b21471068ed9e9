"""Pages that show images to a model: their Python, their commands and their calls by hand run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fixtures.pages import SHOWN_ADDRESS, Block, blocks_of, program_of
from tests.fixtures.pages.desk import Desk
from tests.fixtures.pages.marks import PAGES
from tests.system.docs.conftest import HAS_VISION, Place
from tests.tidy.tree import ROOT

pytestmark = [
    pytest.mark.docs,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_VISION, reason="the extra `vision` is not installed"),
]

SEEN = {page: [block for block in blocks_of(page) if block.mark == "run: vision"] for page in PAGES}
SEEN = {page: blocks for page, blocks in SEEN.items() if blocks}

EXPECTED_OF_IMAGES: Mapping[str, tuple[str, ...]] = {
    "images.md": (r"tokens of image, [1-9]\d* of \d+ cached", r"[1-9]\d* from RAM"),
}
"""What a page's output must have."""


@pytest.mark.parametrize("page", SEEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_of_images_runs(page: Path, places: Mapping[str, Place], desk: Desk) -> None:
    place = places["seeing"]
    variables = {"ICEHOUSE_CLIENT_ADDRESS": place.address}
    python = program_of([block for block in SEEN[page] if block.language == "python"], place.address)
    output = desk.run([sys.executable, "-W", "error", "-c", python], variables)
    for block in SEEN[page]:
        if block.language == "sh" and not is_by_hand(block):
            output += desk.shell(block.text, variables)
    for pattern in EXPECTED_OF_IMAGES[page.name]:
        assert re.search(pattern, output), f"{pattern!r} is not in what {page.name} prints:\n{output[-3000:]}"


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not on the path")
@pytest.mark.parametrize("page", SEEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_calls_by_hand_with_images_are_answered(
    page: Path, places: Mapping[str, Place], desk: Desk
) -> None:
    calls = [block for block in SEEN[page] if is_by_hand(block)]
    assert calls, f"{page.name} shows no call by hand"
    for block in calls:
        answer = desk.shell(block.text.replace(SHOWN_ADDRESS, places["seeing"].address), {})
        assert re.search(r'"image_?[tT]okens": [1-9]', answer), answer


def is_by_hand(block: Block) -> bool:
    """Whether a block asks without a client of ours."""
    return "grpcurl" in block.text
