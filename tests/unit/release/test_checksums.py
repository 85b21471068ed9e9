"""A release's sums: they notice what is missing, changed or added, and need nothing but the folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from release import checksums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a release of two files, with its sums."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "a.whl").write_bytes(b"wheel")
    (tmp_path / "name with spaces").write_bytes(b"")
    checksums.write(tmp_path)
    return tmp_path


def test_a_whole_release_has_no_faults(folder: Path) -> None:
    assert list(checksums.faults_of(folder)) == []


def test_what_is_missing_changed_or_added_is_named(folder: Path) -> None:
    (folder / "python" / "a.whl").write_bytes(b"whee1")
    (folder / "name with spaces").unlink()
    (folder / "python" / "b.whl").write_bytes(b"")
    assert list(checksums.faults_of(folder)) == [
        "name with spaces: missing",
        "python/a.whl: not what was released",
        "python/b.whl: not in SHA256SUMS",
    ]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not here")
def test_the_systems_own_program_reads_them(folder: Path) -> None:
    command = ["sha256sum", "--check", "--strict", "--quiet", checksums.NAME]
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 0
    (folder / "python" / "a.whl").write_bytes(b"")
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 1
