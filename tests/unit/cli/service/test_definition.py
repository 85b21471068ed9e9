"""A service's file: written whole, and never over what somebody changed by hand."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from icehouse_server.cli.service.managers import (
    SEAL_LINE,
    DefinitionFile,
    ServiceError,
    ServiceFileState,
    is_untouched,
    sealed,
)

OLD, NEW = sealed(f"# {SEAL_LINE}\nold\n"), sealed(f"# {SEAL_LINE}\nnew\n")


@pytest.fixture
def file(tmp_path: Path) -> DefinitionFile:
    return DefinitionFile(tmp_path / "deep" / "down" / "icehouse.service")


def test_any_change_breaks_the_seal() -> None:
    assert is_untouched(OLD) and is_untouched(NEW)
    for changed in (OLD.replace("old", "mine"), OLD + "\n", "", f"# {SEAL_LINE}\nold\n", OLD + OLD):
        assert not is_untouched(changed)


def test_a_file_is_written_and_an_older_one_replaced(file: DefinitionFile) -> None:
    assert file.state(NEW) is ServiceFileState.ABSENT
    file.write(OLD, is_forced=False)
    assert (file.state(OLD), file.state(NEW)) == (ServiceFileState.SAME, ServiceFileState.OLDER)
    file.write(NEW, is_forced=False)
    assert file.path.read_text() == NEW
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    file.guard_removal(is_forced=False)
    file.path.unlink()
    assert file.state() is ServiceFileState.ABSENT


@pytest.mark.parametrize("content", [b"", OLD.replace("old", "mine").encode(), b"\xff\xfe"])
def test_a_changed_file_is_left_alone_unless_it_is_said(file: DefinitionFile, content: bytes) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(content)
    for order in (lambda: file.write(NEW, is_forced=False), lambda: file.guard_removal(is_forced=False)):
        with pytest.raises(ServiceError, match=r"was edited after .* wrote it.*--force"):
            order()
        assert file.path.read_bytes() == content
    file.guard_removal(is_forced=True)
    file.write(NEW, is_forced=True)
    assert file.path.read_text() == NEW


@pytest.mark.parametrize("target", ["/dev/null", "own.service", "gone.service"])
def test_a_link_is_somebodys_own(file: DefinitionFile, target: str) -> None:
    file.path.parent.mkdir(parents=True)
    (own := file.path.with_name("own.service")).write_text(OLD)
    file.path.symlink_to(target)
    with pytest.raises(ServiceError):
        file.write(NEW, is_forced=False)
    if target == "own.service":
        file.write(NEW, is_forced=True)
        assert not file.path.is_symlink() and own.read_text() == OLD


def test_a_write_that_fails_leaves_nothing_behind(
    file: DefinitionFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file.path))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        file.write(NEW, is_forced=False)
    assert list(file.path.parent.iterdir()) == []


def test_nothing_is_removed_where_nothing_is(file: DefinitionFile) -> None:
    with pytest.raises(ServiceError, match="no service is installed"):
        file.guard_removal(is_forced=True)
