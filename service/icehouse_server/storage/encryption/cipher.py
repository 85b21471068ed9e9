"""Cipher: what the SSD tier wants of encryption. `aes_gcm` is the one implementation.

A vault stands for one data key. It holds no state that changes, so any thread may use it.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import Fingerprint

SALT_BYTES = 32
TAG_BYTES = 16
KEY_ID_BYTES = 8
KEY_DETAIL = "encryption_key"
"""Among a fingerprint's details: the id of the key that its blocks are encrypted under."""


class Sealer(Protocol):
    """Encrypts one region of one file, piece by piece in file order."""

    def update(self, data: memoryview, target: memoryview) -> None:
        """Encrypt `data` into `target`, which has the same size."""
        ...

    def finish(self) -> bytes:
        """Return the tag that proves the region; nothing can be added after it."""
        ...


class Opener(Protocol):
    """Decrypts one region of one file, piece by piece in file order."""

    def update(self, data: memoryview) -> None:
        """Decrypt in place. The bytes must not be used before `finish` said yes."""
        ...

    def finish(self) -> bool:
        """Say whether every byte is what was encrypted for this place in this file."""
        ...


class FileVault(Protocol):
    """The encryption of one block file, under a key of its own."""

    def seal_head(self, text: bytes) -> bytes:
        """Return the encrypted private part of a head, tag included."""
        ...

    def open_head(self, sealed: bytes) -> bytes | None:
        """Invert `seal_head`; None when it is not what was encrypted for this file."""
        ...

    def sealer(self, kind: RegionKind) -> Sealer:
        """Begin to encrypt the region of this kind."""
        ...

    def opener(self, kind: RegionKind, *, tag: bytes) -> Opener:
        """Begin to decrypt the region of this kind."""
        ...


class Vault(Protocol):
    """One data key and what comes from it."""

    @property
    def key_id(self) -> bytes:
        """Names the key; public."""
        ...

    @property
    def name_secret(self) -> bytes:
        """What blocks are named under, so that names tell nothing to those who guess prompts."""
        ...

    def new_salt(self) -> bytes:
        """Return the salt of one new file: random, and never used for another."""
        ...

    def file(self, *, salt: bytes, facts: bytes) -> FileVault:
        """Return one file's encryption; `facts` are bound to it and change nothing unnoticed."""
        ...


def sealed_fingerprint(fingerprint: Fingerprint, key_id: bytes) -> Fingerprint:
    """Return what a model's blocks under one key are filed as: apart from those under any other."""
    return Fingerprint(hashlib.sha256(b"icehouse.fingerprint.sealed.v1\x00" + key_id + fingerprint).digest())
