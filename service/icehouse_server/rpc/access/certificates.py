"""Certificates of the server, read again when their files change, without a restart.

gRPC asks for the certificate before each handshake. Running connections keep the one they began with,
so no call notices a change. A new pair is checked before it is used: files are often replaced one by
one, and a certificate without its key would turn everybody away.
"""

from __future__ import annotations

import dataclasses
import ssl
import stat
import threading
from pathlib import Path

import grpc

from icehouse_server.config import SecurityConfig
from icehouse_server.errors import Reason, StartError
from icehouse_server.small_file import read_small_file


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    """What was read, to see a change by."""

    certificate: bytes
    key: bytes


class Certificates:
    """Certificate, key and client authorities from files.

    Each `refresh` may run on a thread of its own: where one file cannot be had, the others are read.
    """

    def __init__(self, *, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._pair: _Pair | None = None
        self._authorities: bytes | None = None
        self._lock = threading.Lock()
        """For `_configuration`, which is made of both."""
        self._configuration: grpc.ServerCertificateConfiguration | None = None

    @property
    def has_authorities(self) -> bool:
        """Whether clients show certificates too."""
        return self._client_ca is not None

    @property
    def key_is_open_to_others(self) -> bool:
        """Whether other users of this machine may read the private key."""
        return bool(stat.S_IMODE(self._key.stat().st_mode) & 0o077)

    def refresh_authorities(self) -> bool:
        """Read the authorities that clients' certificates are of; True when they had changed.

        Raises StartError for a file that holds none. The ones known before then stay.
        """
        if self._client_ca is None:
            return False
        found = self._read(self._client_ca)
        if found == self._authorities:
            return False
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_verify_locations(cadata=found.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise _error(self._client_ca, f"it holds no certificate of an authority ({error})") from error
        with self._lock:
            self._authorities = found
            self._configure()
        return True

    def refresh_pair(self) -> bool:
        """Read the certificate and its key again; True when they had changed.

        Raises StartError for files that make no certificate. The one known before then stays.
        """
        found = self._read_pair()
        if found == self._pair:
            return False
        self._check_pair()
        if self._read_pair() != found:
            # Being replaced right now; the next look finds them at rest.
            return False
        with self._lock:
            self._pair = found
            self._configure()
        return True

    def _configure(self) -> None:
        if self._pair is not None:
            self._configuration = grpc.ssl_server_certificate_configuration(
                [(self._pair.key, self._pair.certificate)], self._authorities
            )

    def credentials(self) -> grpc.ServerCredentials:
        """Return what to listen with. Keep this object for as long as the server listens."""
        return grpc.dynamic_ssl_server_credentials(
            self._current(),
            self._current,
            require_client_authentication=self._client_ca is not None,
        )

    def _current(self) -> grpc.ServerCertificateConfiguration:
        # Asked before each handshake, on a thread of gRPC's: nothing here may wait.
        assert self._configuration is not None, "the certificate was not read before it was to be used"
        return self._configuration

    def _read_pair(self) -> _Pair:
        return _Pair(self._read(self._certificate), self._read(self._key))

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            return read_small_file(path).content
        except OSError as error:
            raise _error(path, error.strerror or "it cannot be read") from error

    def _check_pair(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An empty password: a key that wants one must fail, not ask at the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (ssl.SSLError, OSError) as error:
            raise _error(
                self._certificate, f"with the key {self._key} it makes no certificate ({error})"
            ) from error


def certificates_of(config: SecurityConfig) -> Certificates | None:
    """Return the configured certificates, not read yet; None without TLS."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return Certificates(
        certificate=Path(config.tls_certificate).expanduser(),
        key=Path(config.tls_key).expanduser(),
        client_ca=None if config.tls_client_ca is None else Path(config.tls_client_ca).expanduser(),
    )


def _error(path: Path, what: str) -> StartError:
    return StartError(
        Reason.CERTIFICATE_INVALID, f"the file {path} cannot be used: {what}", metadata={"file": path}
    )
