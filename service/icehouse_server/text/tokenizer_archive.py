"""Tokenizer archive: a zip of the files that a gateway needs to tokenize, render and prepare images as this
server does, and a digest of the tokenizer's own files.

The same folder always gives the same bytes, so a gateway can compare two workers by the digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from collections.abc import Iterator, Set
from pathlib import Path

from icehouse_server.errors import ModelError, Reason
from icehouse_server.small_file import MODEL_FILE_LIMIT_BYTES, read_small_file

_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_IMAGE_NAMES = frozenset({"preprocessor_config.json", "processor_config.json"})
"""Files of the image processor: gateways need them to prepare images, but no token depends on them."""
_ENDINGS = frozenset({".jinja", ".model", ".tiktoken"})
_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip allows; with the files' own dates, each copy of a folder would differ."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """A zip and the SHA-256 of its bytes in hex."""

    data: bytes
    sha256_hex: str


def read_tokenizer_archive(folder: Path) -> TokenizerArchive:
    """Return the archive of a model's folder; raises ModelError if it cannot be read. May take a second."""
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in _files(folder, _NAMES | _IMAGE_NAMES):
                entry = zipfile.ZipInfo(file.name, _DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, _read(file))
    except OSError as error:
        raise _unreadable(folder, error) from error
    data = buffer.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())


def tokenizer_digest_hex(folder: Path) -> str:
    """Return the SHA-256 of the names and bytes of the tokenizer's files; raises ModelError likewise."""
    digest = hashlib.sha256()
    try:
        for file in _files(folder, _NAMES):
            data = _read(file)
            digest.update(f"{file.name}\0{len(data)}\0".encode() + data)
    except OSError as error:
        raise _unreadable(folder, error) from error
    return digest.hexdigest()


def _files(folder: Path, names: Set[str]) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if (file.name in names or file.suffix in _ENDINGS) and file.is_file():
            yield file


def _read(file: Path) -> bytes:
    return read_small_file(file, limit_bytes=MODEL_FILE_LIMIT_BYTES).content


def _unreadable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        Reason.MODEL_INVALID, f"the tokenizer's files in {folder} cannot be read: {error.strerror}"
    )
