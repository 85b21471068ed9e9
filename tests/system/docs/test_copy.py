"""Commands that write into the checkout, run in a copy of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from release import version
from release.api_image import IMAGE
from tests.fixtures.pages.desk import Desk
from tests.fixtures.pages.marks import shell_blocks
from tests.tidy.tree import ROOT, text_files

pytestmark = [pytest.mark.docs, pytest.mark.timeout(300)]

_OF_THE_COPY: Mapping[str, str] = {"PYTHONPATH": os.pathsep.join((".", "service", "gen/python"))}


@pytest.fixture
def copy(tmp_path: Path, desk: Desk) -> Path:
    """The repository's text files and the API's image, with the environment."""
    folder = tmp_path / "copy"
    for path, _ in text_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    shutil.copytree(ROOT / "gen", folder / "gen")
    shutil.copy(IMAGE, folder / IMAGE.relative_to(ROOT))
    (folder / ".venv").symlink_to(desk.folder / ".venv")
    return folder


def test_the_steps_of_a_release_that_write_into_the_checkout(copy: Path, desk: Desk) -> None:
    blocks = shell_blocks("run: copy")
    assert {block.page.name for block in blocks} == {"releases.md"}
    image = copy / IMAGE.relative_to(ROOT)
    image.unlink()
    for block in blocks:
        desk.run(["bash", "-euc", block.text], _OF_THE_COPY, folder=copy)
    assert version.current(copy) == "0.2.0" != version.current() and list(version.stale(copy)) == []
    assert image.stat().st_size > 0 and IMAGE.exists()
