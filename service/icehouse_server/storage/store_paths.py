"""Paths in the cache directory. Only this module makes or parses such names."""

from __future__ import annotations

import re

from icehouse_server.domain.ids import BlockHash, Fingerprint

PARTIAL_SUFFIX = ".partial"
BLOCK_SUFFIX = ".safetensors"

_FOLDER = re.compile(r"[0-9a-f]{16}")
_BLOCK = re.compile(r"([0-9a-f]{64})\.safetensors")
_FETCHED_SUFFIX = ".fetched"
_PARTIAL = re.compile(r"[0-9a-f]{64}\.safetensors(\.fetched)?\.partial")
_ROOT_FILE = re.compile(r"lock|ballast|(clean|digests|keys|manifest)\..*")


class StorePaths:
    """The names below one cache directory.

    Each fingerprint has its own folder of blocks, so that a model's blocks can be seen and removed
    together. Common file systems index large folders, so there is no further sharding.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.lock = f"{root}/lock"
        self.manifest = f"{root}/manifest.sqlite3"
        self.manifest_aside = f"{root}/manifest.damaged.sqlite3"
        """Where an unreadable manifest is moved, replacing any moved before."""
        self.manifest_later = f"{root}/manifest.later.sqlite3"
        """Where a later version's manifest is moved, so that that version can be started on it again."""
        self.manifests_aside = (self.manifest_aside, self.manifest_later)
        self.data_keys = f"{root}/keys.json"
        """The keys that blocks are encrypted under, each encrypted itself."""
        self.ballast = f"{root}/ballast"
        self.digests = f"{root}/digests.json"
        """Digests of the served weights; nothing about prompts."""
        self.clean_mark = f"{root}/clean.json"
        """What the directory looked like after the last clean shutdown."""
        self.blocks = f"{root}/blocks"
        self.quarantine = f"{root}/quarantine"

    def data_keys_aside(self, number: int = 1) -> str:
        """Return where an unreadable key file is moved."""
        return f"{self.root}/keys.damaged{'' if number == 1 else f'.{number}'}.json"

    def folder(self, fingerprint: Fingerprint) -> str:
        return f"{self.blocks}/{fingerprint.hex()[:16]}"

    def block(self, fingerprint: Fingerprint, block_hash: BlockHash) -> str:
        return f"{self.folder(fingerprint)}/{block_hash.hex()}{BLOCK_SUFFIX}"

    def fetched(self, fingerprint: Fingerprint, block_hash: BlockHash) -> str:
        """Return where a block fetched from another server is written; a spill of it uses another name."""
        return self.block(fingerprint, block_hash) + _FETCHED_SUFFIX + PARTIAL_SUFFIX

    def quarantined(self, block_hash: BlockHash) -> str:
        """Return where a damaged block is moved; a second one of this hash replaces the first."""
        return f"{self.quarantine}/{block_hash.hex()}{BLOCK_SUFFIX}"


def is_data_keys_name(name: str) -> bool:
    """Return whether a name in the root is that of a key file, also one moved aside or unfinished."""
    return name.startswith("keys.")


def is_folder_name(name: str) -> bool:
    """Return whether `name` can be a fingerprint's folder."""
    return _FOLDER.fullmatch(name) is not None


def is_root_file_name(name: str) -> bool:
    """Return whether a name in the root is that of one of our files, SQLite's logs included."""
    return _ROOT_FILE.fullmatch(name) is not None


def is_partial_name(name: str) -> bool:
    """Return whether `name` is that of an unfinished block file of ours."""
    return _PARTIAL.fullmatch(name) is not None


def parse_block_name(name: str) -> BlockHash | None:
    """Return the hash in a block file's name, or None if this is not such a name."""
    match = _BLOCK.fullmatch(name)
    return BlockHash(bytes.fromhex(match[1])) if match else None
