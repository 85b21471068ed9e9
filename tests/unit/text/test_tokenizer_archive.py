"""The archive that gateways get: the tokenizer's files and no others, the same bytes for the same folder."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest
from icehouse_server.errors import ModelError
from icehouse_server.text.tokenizer_archive import read_tokenizer_archive, tokenizer_digest_hex

FILES = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"[]",
    "config.json": b"{1}",
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.model": b"\0\1",
}


IMAGE_FILES = {"preprocessor_config.json": b"{2}", "processor_config.json": b"{3}"}


def folder(path: Path) -> Path:
    path.mkdir()
    for name, data in {**FILES, **IMAGE_FILES, "model.safetensors": b"weights", "README.md": b"text"}.items():
        (path / name).write_bytes(data)
    (path / "merges.txt").mkdir()
    return path


def test_it_holds_the_files_of_tokenizer_and_images_alone(tmp_path: Path) -> None:
    archive = read_tokenizer_archive(folder(tmp_path / "a"))
    with zipfile.ZipFile(io.BytesIO(archive.data)) as opened:
        assert {name: opened.read(name) for name in opened.namelist()} == FILES | IMAGE_FILES
    assert archive.sha256_hex == hashlib.sha256(archive.data).hexdigest()


def test_a_copy_of_the_folder_gives_the_same_archive(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    os.utime(second / "tokenizer.json", (1, 1))
    assert read_tokenizer_archive(first) == read_tokenizer_archive(second)


def test_the_digest_is_of_the_tokenizer_s_files_alone(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    digest = tokenizer_digest_hex(first)
    (second / "model.safetensors").write_bytes(b"others")
    (second / "preprocessor_config.json").write_bytes(b"{4}")
    assert tokenizer_digest_hex(second) == digest
    (second / "chat_template.jinja").write_bytes(b"{{ messages[0] }}")
    assert tokenizer_digest_hex(second) != digest


def test_a_folder_that_is_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_tokenizer_archive(tmp_path / "gone")
    with pytest.raises(ModelError, match="cannot be read"):
        tokenizer_digest_hex(tmp_path / "gone")
