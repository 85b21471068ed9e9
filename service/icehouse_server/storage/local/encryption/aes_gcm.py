"""AES-256-GCM for block files, from the `cryptography` package. Only this module imports that package.

Each file has its own key, derived (HKDF-SHA-256) from the data key and the file's random salt, and
each part of a file its own nonce: 0 for the head, 1 to 3 for the regions. So no key ever uses a
nonce twice, however many files one data key encrypts. The public facts of the head are additional
authenticated data of every part (NIST SP 800-38D).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import ciphers
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.storage.local.encryption.constants import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES

KEY_BYTES = 32
_ID_TAG = b"icehouse.data-key.id.v1\x00"
_NAMES_INFO = b"icehouse.data-key.names.v1"
_SHARED_INFO = b"icehouse.data-key.shared.v1"
_FILE_INFO = b"icehouse.data-key.file.v1"
_NONCE_BYTES = 12
_PARTS: dict[RegionKind | None, int] = {None: 0}
_PARTS.update({kind: number for number, kind in enumerate(RegionKind, start=1)})


class Cipher:
    """One data key of 32 bytes and what is derived from it. Immutable, so any thread may use it.

    `key_id` names the key and is public. Block names depend on `name_secret`, so that nobody can confirm a
    guessed prompt by its name.
    """

    def __init__(
        self,
        data_key: bytes,
        *,
        wrapped_key: bytes = b"",
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`wrapped_key` is the data key as stored in the directory; empty if it is not stored."""
        assert len(data_key) == KEY_BYTES, f"A data key has {KEY_BYTES} bytes, not {len(data_key)}"
        self._data_key = data_key
        self.wrapped_key = wrapped_key
        self._random_bytes = random_bytes
        self.key_id = hashlib.sha256(_ID_TAG + data_key).digest()[:KEY_ID_BYTES]
        self.name_secret = _derive(data_key, salt=b"", info=_NAMES_INFO)

    def new_salt(self) -> bytes:
        """Return the salt of one new file: random, and never used for another."""
        return self._random_bytes(SALT_BYTES)

    def file(self, *, salt: bytes, facts: bytes) -> FileCipher:
        """Return one file's encryption; any change of `facts` makes all of the file unreadable."""
        file_key = _derive(self._data_key, salt=salt, info=_FILE_INFO)
        return FileCipher(file_key, facts, key_id=self.key_id, salt=salt)


class FileCipher:
    """The encryption of one block file, under its own key. `key_id` and `salt` are stored in the file."""

    def __init__(self, file_key: bytes, facts: bytes, *, key_id: bytes, salt: bytes) -> None:
        self.key_id = key_id
        self.salt = salt
        self._file_key = file_key
        self._facts = facts

    def encrypt_header(self, text: bytes) -> bytes:
        """Return the encrypted private part of a header, tag included."""
        return AESGCM(self._file_key).encrypt(_nonce(None), text, self._facts)

    def decrypt_header(self, encrypted: bytes) -> bytes | None:
        """Invert `encrypt_header`; None if it is not what was encrypted for this file."""
        try:
            return AESGCM(self._file_key).decrypt(_nonce(None), encrypted, self._facts)
        except InvalidTag:
            return None

    def encryptor(self, kind: RegionKind) -> Encryptor:
        context = self._region_cipher(kind).encryptor()
        context.authenticate_additional_data(self._facts)
        return Encryptor(context)

    def decryptor(self, kind: RegionKind, *, tag: bytes) -> Decryptor:
        context = self._region_cipher(kind).decryptor()
        context.authenticate_additional_data(self._facts)
        return Decryptor(context, tag)

    def _region_cipher(self, kind: RegionKind) -> ciphers.Cipher[GCM]:
        return ciphers.Cipher(AES256(self._file_key), GCM(_nonce(kind)))


class Encryptor:
    """Encrypts one region of one file, piece by piece in file order."""

    def __init__(self, context: AEADEncryptionContext) -> None:
        self._context = context

    def update(self, data: memoryview, target: memoryview) -> None:
        """Encrypt `data` into `target` of the same size, without holding the interpreter's lock."""
        self._context.update_into(data, target)

    def finish(self) -> bytes:
        """Return the tag that authenticates the region; nothing can be added after it."""
        self._context.finalize()
        return self._context.tag


class Decryptor:
    """Decrypts one region of one file, piece by piece in file order."""

    def __init__(self, context: AEADDecryptionContext, tag: bytes) -> None:
        self._context = context
        self._tag = tag

    def update(self, data: memoryview) -> None:
        """Decrypt in place. The bytes must not be used before `finish` has returned True."""
        self._context.update_into(data, data)

    def finish(self) -> bool:
        """Return whether every byte is what was encrypted for this position in this file."""
        if len(self._tag) != TAG_BYTES:
            return False
        try:
            self._context.finalize_with_tag(self._tag)
        except InvalidTag:
            return False
        return True


def shared_data_key(master_key: bytes) -> bytes:
    """Return the data key of all servers that share an object store under this master key. It is derived, so
    that they agree on it without communication."""
    return _derive(master_key, salt=b"", info=_SHARED_INFO)


def wrap_key(data_key: bytes, *, master_key: bytes) -> bytes:
    """Return a data key encrypted under the master key (AES key wrap, RFC 3394)."""
    return aes_key_wrap(master_key, data_key)


def unwrap_key(wrapped: bytes, *, master_key: bytes) -> bytes | None:
    """Invert `wrap_key`; None if it was wrapped under another key, or changed."""
    try:
        return aes_key_unwrap(master_key, wrapped)
    except (InvalidUnwrap, ValueError):
        return None


def _nonce(kind: RegionKind | None) -> bytes:
    return _PARTS[kind].to_bytes(_NONCE_BYTES, "big")


def _derive(key: bytes, *, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(key)
