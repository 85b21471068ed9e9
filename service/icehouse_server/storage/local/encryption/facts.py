"""Encryption facts: what files and the manifest tell of it to those who have neither key nor package."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from icehouse_server.domain.ids import Fingerprint

if TYPE_CHECKING:
    from icehouse_server.storage.local.encryption.aes_gcm import Cipher as Cipher
    from icehouse_server.storage.local.encryption.aes_gcm import Encryptor as Encryptor
    from icehouse_server.storage.local.encryption.aes_gcm import FileCipher as FileCipher
else:
    # Of an optional extra: loaded only where a key is configured, and named everywhere.
    Cipher = Encryptor = FileCipher = object

SALT_BYTES = 32
TAG_BYTES = 16
KEY_ID_BYTES = 8
KEY_DETAIL = "encryption_key"
"""Among a fingerprint's details: the id of the key that its blocks are encrypted under."""


def encrypted_fingerprint(fingerprint: Fingerprint, key_id: bytes) -> Fingerprint:
    """Return what a model's blocks under one key are filed as: apart from those under any other."""
    return Fingerprint(hashlib.sha256(b"icehouse.fingerprint.sealed.v1\x00" + key_id + fingerprint).digest())
