"""The cache commands where there is nothing to look at, and how they speak of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.cli.cache_directory import app, fact_text, model_text
from icehouse_server.errors import Reason, StorageError
from typer.testing import CliRunner

from tests.fixtures.storage.blocks import FINGERPRINT, make_chain
from tests.fixtures.storage.storage_thread import StorageThread


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_ls_says_that_there_is_nothing_yet(tmp_path: Path) -> None:
    assert f"no blocks in {tmp_path / 'none'}" in run("ls", "--cache-directory", str(tmp_path / "none"))


@pytest.mark.parametrize("words", [("check",), ("verify",), ("inspect", "ab"), ("purge", "--all", "--yes")])
def test_a_directory_that_no_server_made_is_an_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    place = tmp_path / "none"
    with pytest.raises(StorageError, match="no cache in") as caught:
        run(*words, "--cache-directory", str(place))
    assert caught.value.reason is Reason.STORE_UNUSABLE
    assert not place.exists()


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="not a directory"):
        run("ls", "--cache-directory", str(tmp_path / "file"))


def test_a_lost_manifest_can_be_checked(tmp_path: Path) -> None:
    with StorageThread(tmp_path) as served:
        served.spill(*make_chain(2))
    (tmp_path / "manifest.sqlite3").unlink()
    result = CliRunner().invoke(app, ["check", "--cache-directory", str(tmp_path)])
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert "2 x " in result.output


def test_a_row_fits_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with StorageThread(tmp_path) as served:
        served.spill(*make_chain(1, checkpoint=True))
    header, row, total = run("ls", "--cache-directory", str(tmp_path)).splitlines()
    block = make_chain(1)[0].header
    assert row.startswith(block.hash.hex()[:12]) and "ago" in row and "checkpoint" in row
    assert "last used" in header and total.startswith("1 of 1 blocks shown")


def test_facts_are_for_people() -> None:
    assert fact_text("file_bytes", 2_695_264) == "2,695,264 bytes (2.57 MiB)"
    assert fact_text("kv_bytes", 0) == "0 bytes"
    assert fact_text("hit_count", 3) == "3"
    details = {"architecture": "llama", "quantization": "none"}
    assert model_text(details, FINGERPRINT) == f"llama {FINGERPRINT.hex()[:8]}"
    assert model_text({"quantization": "4-bit"}, FINGERPRINT).startswith("4-bit ")
