"""Encryption facts: what files and the manifest tell of it to those who have neither key nor package."""

from __future__ import annotations

import hashlib

from icehouse_server.domain.ids import Fingerprint

SALT_BYTES = 32
TAG_BYTES = 16
KEY_ID_BYTES = 8
KEY_DETAIL = "encryption_key"
"""Among a fingerprint's details: the id of the key that its blocks are encrypted under."""


def encrypted_fingerprint(fingerprint: Fingerprint, key_id: bytes) -> Fingerprint:
    """Return what a model's blocks under one key are filed as: apart from those under any other."""
    return Fingerprint(hashlib.sha256(b"icehouse.fingerprint.sealed.v1\x00" + key_id + fingerprint).digest())
