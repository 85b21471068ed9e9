"""Where the cache's key comes from, and which ones are refused in which words."""

from __future__ import annotations

import base64
import errno
import sys
from pathlib import Path
from typing import cast

import pytest
from icehouse_server.bootstrap.encryption import (
    key_of_command,
    key_of_file,
    new_key_text,
    open_cipher,
    read_master_key,
)
from icehouse_server.config import CacheConfig, load_config
from icehouse_server.errors import ConfigError, Reason, StartError
from icehouse_server.storage.files import Files

from tests.fixtures.storage.faults import FaultyFiles

KEY = bytes(range(32))


def key_file(folder: Path, text: bytes, *, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(text)
    path.chmod(mode)
    return path


def refusal(action, *arguments) -> str:
    with pytest.raises(StartError) as caught:
        action(*arguments)
    assert caught.value.reason is Reason.CACHE_KEY_INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        KEY.hex().encode(),
        KEY.hex().upper().encode() + b"\n",
        base64.b64encode(KEY),
        b" " + base64.b64encode(KEY) + b"\r\n",
    ],
)
def test_a_key_is_hexadecimal_or_base64(tmp_path: Path, text: bytes) -> None:
    assert key_of_file(key_file(tmp_path, text)) == KEY


def test_a_new_key_is_a_key_and_another_one_each_time(tmp_path: Path) -> None:
    texts = [new_key_text() for _ in range(2)]
    keys = [key_of_file(key_file(tmp_path, text.encode())) for text in texts]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"secret",
        KEY.hex().encode()[:-2],
        KEY,
        KEY.hex().encode() + b" more",
        b"\xff" * 44,
        b"0" * 9000,
    ],
)
def test_anything_else_is_refused_without_showing_it(tmp_path: Path, text: bytes) -> None:
    message = refusal(key_of_file, key_file(tmp_path, text))
    assert "icehouse key new" in message
    assert not text.strip() or text.decode(errors="replace") not in message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    assert "chmod 600" in refusal(key_of_file, key_file(tmp_path, KEY.hex().encode(), mode=mode))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refusal(key_of_file, tmp_path / "none")
    assert "not a plain file" in refusal(key_of_file, tmp_path)


def test_a_command_prints_the_key() -> None:
    assert key_of_command(f"{sys.executable} -c 'print(\"{KEY.hex()}\")'") == KEY


def test_no_shell_reads_the_command(tmp_path: Path) -> None:
    key_file(tmp_path, KEY.hex().encode())
    assert key_of_command(f"cat '{tmp_path}/key'") == KEY
    refusal(key_of_command, f"cat {tmp_path}/ke? ; true")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program-of-ours", "cannot be run"),
        ("cat 'unclosed", "cannot be run"),
        ("", "cannot be run"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"locked\")'", "ended with 1: locked"),
        ("true", "is not a key"),
        ("false", "it printed nothing"),
    ],
)
def test_a_command_that_gives_no_key_is_told_as_it_ended(command: str, said: str) -> None:
    assert said in refusal(key_of_command, command)


def test_file_and_command_together_are_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of them"):
        load_config(flags={"cache.key_file": "a", "cache.key_command": "b"}, environ={})
    assert read_master_key(CacheConfig()) is None


def test_without_the_package_nothing_starts_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "icehouse_server.storage.local.directory.data_keys", None)
    monkeypatch.delattr("icehouse_server.storage.local.directory.data_keys", raising=False)
    config = CacheConfig(directory=str(tmp_path), key_file=str(key_file(tmp_path, KEY.hex().encode())))
    with pytest.raises(StartError, match=r"\.\[encryption\]") as caught:
        open_cipher(config, Files())
    assert caught.value.reason is Reason.ENCRYPTION_MISSING


def test_a_directory_that_cannot_be_had_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    config = CacheConfig(
        directory=str(tmp_path / "file"), key_file=str(key_file(tmp_path, KEY.hex().encode()))
    )
    with pytest.raises(StartError) as caught:
        open_cipher(config, Files())
    assert caught.value.reason is Reason.STORE_UNUSABLE


def test_a_directory_that_takes_no_writes_is_read_with_the_key_that_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CacheConfig(
        directory=str(tmp_path / "blocks"), key_file=str(key_file(tmp_path, KEY.hex().encode()))
    )
    refusing = FaultyFiles("lock", 1, errno.EROFS, times=2)
    refusing.is_armed = True
    with pytest.raises(StartError) as caught:
        open_cipher(config, cast("Files", refusing))
    assert caught.value.reason is Reason.STORE_UNUSABLE, "there is not a key yet, and none can be kept"
    made = open_cipher(config, Files())
    found = open_cipher(config, cast("Files", refusing))
    assert made is not None and found is not None and found.key_id == made.key_id
    assert refusing.failed_count == 2 and "cache_key_read_only" in caplog.text
