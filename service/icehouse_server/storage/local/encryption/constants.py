"""Constants of encrypted files and rows, usable without a key and without the `cryptography` package."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from icehouse_server.domain.ids import Fingerprint

if TYPE_CHECKING:
    from icehouse_server.storage.local.encryption.aes_gcm import Cipher as Cipher
    from icehouse_server.storage.local.encryption.aes_gcm import Encryptor as Encryptor
    from icehouse_server.storage.local.encryption.aes_gcm import FileCipher as FileCipher
else:
    # They belong to an optional extra: loaded only if a key is configured, but named everywhere.
    Cipher = Encryptor = FileCipher = object

SALT_BYTES = 32
TAG_BYTES = 16
KEY_ID_BYTES = 8
KEY_DETAIL = "encryption_key"
"""Name of the fingerprint detail that has the id of the key under which its blocks are encrypted."""


def encrypted_fingerprint(fingerprint: Fingerprint, key_id: bytes) -> Fingerprint:
    """Return the fingerprint of a model's blocks under one key, different for every key."""
    return Fingerprint(hashlib.sha256(b"icehouse.fingerprint.sealed.v1\x00" + key_id + fingerprint).digest())
