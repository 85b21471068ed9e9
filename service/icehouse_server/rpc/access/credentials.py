"""Credentials: certificates and tokens from files, and whom a call's credentials belong to.

With a token file, every call needs a token, and the token alone says who calls: then a client certificate may
belong to a proxy. Without one, the client certificate says it: by its first URI name (as SPIFFE writes it),
otherwise its first DNS name. The common name is never used.

All files are read at start and again at an interval. gRPC asks for the certificate before each handshake, and
open connections keep theirs, so no call notices a change. A new pair is checked before it is used: files are
often replaced one by one, and with a certificate that does not match its key nobody could connect.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import grpc

from icehouse_server.clock import Clock
from icehouse_server.config import SecurityConfig
from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import Reason, StartError, Unauthenticated
from icehouse_server.rpc.access.caller import UNPROVED, Caller, CallerRole
from icehouse_server.rpc.access.shares import start_daemon
from icehouse_server.rpc.access.tokens import TokenFile
from icehouse_server.small_file import read_small_file

_logger = logging.getLogger("icehouse_server.rpc.access.credentials")

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]

_SCHEME = "bearer "
_NAME_BYTE_LIMIT = 128
_SLOW_S = 10.0
"""A refresh that takes longer is logged."""


class ServerSecurity:
    """The server's own credentials and the check of callers' credentials. Owned by the event loop."""

    def __init__(self, config: SecurityConfig, *, clock: Clock) -> None:
        self._interval_s = config.reload_s
        self._certificates: Certificates | None = None
        if config.tls_certificate is not None and config.tls_key is not None:
            self._certificates = Certificates(
                config.tls_certificate, config.tls_key, client_ca=config.tls_client_ca
            )
        self._tokens = None if config.token_file is None else TokenFile(Path(config.token_file))
        self._refreshes: dict[str, Callable[[], bool]] = {}
        """By the kind of file. Each runs separately, so that one that hangs does not stop the others."""
        if self._tokens is not None:
            self._refreshes["tokens"] = functools.partial(self._refresh_tokens, self._tokens)
        if self._certificates is not None:
            self._refreshes["certificate"] = self._certificates.refresh_pair
            if config.tls_client_ca is not None:
                self._refreshes["authorities"] = self._certificates.refresh_authorities
        self._logged: dict[str, str] = {}
        self.credentials: grpc.ServerCredentials | None = None
        """What to listen with, once loaded; None for plain text."""
        self._by_certificate = config.tls_client_ca is not None
        self._operator_names = config.operator_names
        self._clock = clock

    def load(self) -> None:
        """Read all files for the first time; raises StartError if one cannot be used."""
        for refresh in self._refreshes.values():
            refresh()
        if self._certificates is not None:
            self.credentials = self._certificates.credentials()
            if self._certificates.key_is_open_to_others:
                _logger.warning(
                    "open_private_key_read", extra={"detail": "other users may read it; run chmod 600 on it"}
                )

    async def run(self) -> None:
        """Refresh all files at the interval, each kind in its own task, until cancelled."""
        async with asyncio.TaskGroup() as looks:
            for name, refresh in self._refreshes.items():
                looks.create_task(self._refresh_loop(name, refresh), name=f"security of {name}")

    async def _refresh_loop(self, name: str, refresh: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._refresh_one(name, refresh)

    async def refresh(self) -> None:
        """Refresh all files now. A file that cannot be used is logged once and changes nothing."""
        await asyncio.gather(*(self._refresh_one(name, refresh) for name, refresh in self._refreshes.items()))

    @staticmethod
    def _refresh_tokens(tokens: TokenFile) -> bool:
        changed = tokens.refresh()
        if changed and not tokens.token_count:
            _logger.warning("empty_token_file_read", extra={"detail": "nobody can call"})
        return changed

    async def _refresh_one(self, name: str, refresh: Callable[[], bool]) -> None:
        try:
            changed = await self._in_own_thread(name, refresh)
        except Exception as error:
            # Anything but a StartError is a bug of ours; the next refresh must still come. Not logged as
            # repr: that of a decoding error contains the whole file.
            detail = f"{type(error).__name__}: {error}"
            if self._logged.get(name) != detail:
                self._logged[name] = detail
                is_bug = not isinstance(error, StartError)
                _logger.error("old_secrets_kept", extra={"kind": name, "detail": detail}, exc_info=is_bug)
            return
        self._logged.pop(name, None)
        if changed:
            _logger.info("new_secrets_taken", extra={"kind": name})

    async def _in_own_thread(self, name: str, refresh: Callable[[], bool]) -> bool:
        """Return what a refresh returns, however long it takes: the file may be on a network disk that hangs.

        The thread is a daemon used only for this refresh, so neither other refreshes nor the process wait for
        it.
        """
        answer = asyncio.wrap_future(start_daemon(refresh, name=f"security-{name}"))
        done, _ = await asyncio.wait({answer}, timeout=_SLOW_S)
        if not done:
            _logger.warning(
                "secrets_out_of_reach",
                extra={
                    "kind": name,
                    "waited_s": _SLOW_S,
                    "detail": "no changes are seen until the disk answers",
                },
            )
        return await answer

    def identify(self, metadata: Metadata, auth_context: AuthContext) -> Caller:
        """Return who calls; raises Unauthenticated."""
        if self._tokens is not None:
            return self._by_token(self._tokens, metadata)
        return self._by_name(auth_context) if self._by_certificate else UNPROVED

    def _by_token(self, tokens: TokenFile, metadata: Metadata) -> Caller:
        given = [value for key, value in metadata if key == "authorization"]
        if not given:
            raise Unauthenticated(
                Reason.CREDENTIALS_MISSING,
                "this server requires a token; send the metadata `authorization: Bearer <token>`",
            )
        if len(given) > 1 or not isinstance(given[0], str) or given[0][: len(_SCHEME)].lower() != _SCHEME:
            raise _invalid("the metadata must have `authorization` exactly once, as `Bearer <token>`")
        caller = tokens.find(given[0][len(_SCHEME) :].strip(), now=self._clock.wall())
        if caller is None:
            raise _invalid("the token is unknown or has expired; ask the server's operator for one")
        return caller

    def _by_name(self, auth_context: AuthContext) -> Caller:
        names = [*auth_context.get("peer_uri", ()), *auth_context.get("peer_dns", ())]
        if not names:
            raise _invalid(
                "the client certificate has no URI or DNS name among its subject alternative names"
            )
        name, size = names[0].decode("utf-8", "replace"), len(names[0])
        if size > _NAME_BYTE_LIMIT:
            raise _invalid(f"the client certificate's name has {size} bytes, the limit is {_NAME_BYTE_LIMIT}")
        role = CallerRole.OPERATOR if name in self._operator_names else CallerRole.TENANT
        return Caller(Tenant(name), role)


def _invalid(message: str) -> Unauthenticated:
    return Unauthenticated(Reason.CREDENTIALS_INVALID, message)


class Certificates:
    """Certificate, key and client authorities from files.

    Each refresh may run in its own thread, so that one file that hangs does not stop the others.
    """

    def __init__(self, certificate: str, key: str, *, client_ca: str | None) -> None:
        self._certificate = Path(certificate)
        self._key = Path(key)
        self._client_ca = None if client_ca is None else Path(client_ca)
        self._pair: tuple[bytes, bytes] | None = None
        """Key and certificate, in the order that gRPC takes them."""
        self._authorities: bytes | None = None
        self._lock = threading.Lock()
        """For `_configuration`, which is built from both."""
        self._configuration: grpc.ServerCertificateConfiguration | None = None

    @property
    def key_is_open_to_others(self) -> bool:
        """Whether other users of this machine may read the private key."""
        return bool(stat.S_IMODE(self._key.stat().st_mode) & 0o077)

    def refresh_authorities(self) -> bool:
        """Read the authorities of client certificates; True if they have changed.

        Raises StartError if the file contains none, and then keeps the previous ones.
        """
        assert self._client_ca is not None, "only a file of authorities is refreshed"
        found = self._read(self._client_ca)
        if found == self._authorities:
            return False
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_verify_locations(cadata=found.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise _error(self._client_ca, f"it has no CA certificate ({error})") from error
        with self._lock:
            self._authorities = found
            self._configure()
        return True

    def refresh_pair(self) -> bool:
        """Read the certificate and its key again; True if they have changed.

        Raises StartError if they do not form a valid pair, and then keeps the previous one.
        """
        found = self._read_pair()
        if found == self._pair:
            return False
        self._check_pair()
        if self._read_pair() != found:
            # They are being replaced right now; the next refresh will find both.
            return False
        with self._lock:
            self._pair = found
            self._configure()
        return True

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the current certificate, key and authorities in PEM. Raises StartError if they are
        invalid."""
        self.refresh_authorities()
        key, certificate = self._read_pair()
        self._check_pair()
        assert self._authorities is not None, "they were read just now"
        return certificate, key, self._authorities

    def _configure(self) -> None:
        if self._pair is not None:
            self._configuration = grpc.ssl_server_certificate_configuration([self._pair], self._authorities)

    def credentials(self) -> grpc.ServerCredentials:
        """Return what to listen with. Keep this object for as long as the server listens."""
        return grpc.dynamic_ssl_server_credentials(
            self._current(), self._current, require_client_authentication=self._client_ca is not None
        )

    def _current(self) -> grpc.ServerCertificateConfiguration:
        # gRPC asks before each handshake, in one of its own threads: nothing here may block.
        assert self._configuration is not None, "the certificate was not read before it was to be used"
        return self._configuration

    def _read_pair(self) -> tuple[bytes, bytes]:
        return self._read(self._key), self._read(self._certificate)

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            return read_small_file(path).content
        except OSError as error:
            raise _error(path, error.strerror or "it cannot be read") from error

    def _check_pair(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An empty password: a key that needs one must fail, not ask at the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (ssl.SSLError, OSError) as error:
            raise _error(
                self._certificate, f"it cannot be loaded with the key {self._key} ({error})"
            ) from error


def check_secrets(config: SecurityConfig) -> None:
    """Raise StartError for token or certificate files that cannot be used."""
    if config.token_file is not None:
        TokenFile(Path(config.token_file)).refresh()
    if config.tls_certificate is not None and config.tls_key is not None:
        certificates = Certificates(config.tls_certificate, config.tls_key, client_ca=config.tls_client_ca)
        certificates.refresh_pair()
        if config.tls_client_ca is not None:
            certificates.refresh_authorities()


def _error(path: Path, what: str) -> StartError:
    return StartError(
        Reason.CERTIFICATE_INVALID, f"the file {path} cannot be used: {what}", metadata={"file": path}
    )
