"""One version: pyproject.toml has it, and every other place what it says."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from release import version


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with the files that say the version."""
    for path in {place.path for place in version.PLACES}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(version.ROOT / path, tmp_path / path)
    return tmp_path


def test_every_place_says_the_version_of_the_project() -> None:
    assert list(version.stale()) == []


def test_a_place_that_says_another_one_is_named(copy: Path) -> None:
    pom = copy / "clients/java/pom.xml"
    wanted = version.current(copy)
    pom.write_text(pom.read_text().replace(f"<version>{wanted}</version>", "<version>9.8.7</version>", 1))
    assert list(version.stale(copy)) == [f"clients/java/pom.xml: 9.8.7, not {wanted}"]


def test_a_version_is_written_everywhere(copy: Path) -> None:
    version.write("12.34.56", copy)
    assert version.current(copy) == "12.34.56" and list(version.stale(copy)) == []
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    assert {"icehouse-client[cli]==12.34.56", "icehouse-protos==12.34.56"} <= set(project["dependencies"])
    lock = json.loads((copy / "clients/node/package-lock.json").read_text())
    assert lock["version"] == lock["packages"][""]["version"] == "12.34.56"
    # Nothing else has changed.
    version.write(version.current(), copy)
    for place in version.PLACES:
        assert (copy / place.path).read_text() == (version.ROOT / place.path).read_text()


@pytest.mark.parametrize("wrong", ["1.2", "v1.2.3", "1.2.3rc1", "1.2.3\n", ""])
def test_what_some_registry_reads_otherwise_is_no_version(copy: Path, wrong: str) -> None:
    with pytest.raises(version.VersionError, match="no version"):
        version.write(wrong, copy)
    assert version.current(copy) == version.current()


def test_a_place_that_is_gone_is_no_silent_success(copy: Path) -> None:
    (copy / "clients/go/README.md").write_text("nothing here\n")
    for order in (lambda: list(version.stale(copy)), lambda: version.write("1.2.3", copy)):
        with pytest.raises(version.VersionError, match=r"clients/go/README\.md has 0 versions"):
            order()
    assert version.current(copy) == version.current()
