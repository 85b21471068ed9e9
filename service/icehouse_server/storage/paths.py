"""Paths in the cache directory. The only place that makes or reads such a name."""

from __future__ import annotations

import dataclasses
import re

from icehouse_server.domain.ids import BlockHash, Fingerprint

PARTIAL_SUFFIX = ".partial"
BLOCK_SUFFIX = ".safetensors"

_FOLDER = re.compile(r"[0-9a-f]{16}")
_BLOCK = re.compile(r"([0-9a-f]{64})\.safetensors")
_PARTIAL = re.compile(r"[0-9a-f]{64}\.safetensors\.partial")
_BESIDE_BLOCKS = re.compile(r"lock|ballast|(clean|digests|keys|manifest)\..*")


@dataclasses.dataclass(frozen=True, slots=True)
class StorePaths:
    """The names below one cache directory.

    Blocks lie in one folder per fingerprint, so that a model's blocks can be seen and removed
    together; both common file systems index large folders, so there is no further sharding.
    """

    root: str

    @property
    def lock(self) -> str:
        return f"{self.root}/lock"

    @property
    def manifest(self) -> str:
        return f"{self.root}/manifest.sqlite3"

    @property
    def manifest_aside(self) -> str:
        """Where a manifest that cannot be read is moved, replacing the one moved before."""
        return f"{self.root}/manifest.damaged.sqlite3"

    @property
    def data_keys(self) -> str:
        """The keys that blocks are encrypted under, each encrypted itself."""
        return f"{self.root}/keys.json"

    def data_keys_aside(self, number: int = 1) -> str:
        """Return where a key file that cannot be read is moved."""
        return f"{self.root}/keys.damaged{'' if number == 1 else f'.{number}'}.json"

    def is_data_keys_name(self, name: str) -> bool:
        """Say whether a name in the root is that of a key file, one moved aside or an unfinished one."""
        return name.startswith("keys.")

    @property
    def ballast(self) -> str:
        """Space kept for deleting rows on a full disk."""
        return f"{self.root}/ballast"

    @property
    def digests(self) -> str:
        """What is known of the served weights; nothing of prompts."""
        return f"{self.root}/digests.json"

    @property
    def clean_mark(self) -> str:
        """What the directory looked like when it was last closed cleanly."""
        return f"{self.root}/clean.json"

    @property
    def blocks(self) -> str:
        return f"{self.root}/blocks"

    @property
    def quarantine(self) -> str:
        return f"{self.root}/quarantine"

    def folder(self, fingerprint: Fingerprint) -> str:
        """Return the folder of one fingerprint's blocks."""
        return f"{self.blocks}/{fingerprint.hex()[:16]}"

    def block(self, fingerprint: Fingerprint, block_hash: BlockHash) -> str:
        """Return the path of a block's file: the one function that names it."""
        return f"{self.folder(fingerprint)}/{block_hash.hex()}{BLOCK_SUFFIX}"

    def quarantined(self, block_hash: BlockHash) -> str:
        """Return where a damaged block goes; a second one of this hash replaces the first."""
        return f"{self.quarantine}/{block_hash.hex()}{BLOCK_SUFFIX}"


def is_folder_name(name: str) -> bool:
    """Say whether `name` can be a fingerprint's folder."""
    return _FOLDER.fullmatch(name) is not None


def is_root_file_name(name: str) -> bool:
    """Say whether `name` in the root is that of a file of ours, SQLite's logs included."""
    return _BESIDE_BLOCKS.fullmatch(name) is not None


def is_partial_name(name: str) -> bool:
    """Say whether `name` is an unfinished block file of ours."""
    return _PARTIAL.fullmatch(name) is not None


def parse_block_name(name: str) -> BlockHash | None:
    """Return the hash in a block file's name, or None when we would not have named it so."""
    match = _BLOCK.fullmatch(name)
    return BlockHash(bytes.fromhex(match[1])) if match else None
