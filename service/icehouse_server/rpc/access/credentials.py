"""Credentials: certificates and tokens, read at start, looked at again at an interval."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from icehouse_server.clock import Clock
from icehouse_server.config import SecurityConfig
from icehouse_server.errors import StartError
from icehouse_server.rpc.access.authentication import Authenticator
from icehouse_server.rpc.access.certificates import certificates_of
from icehouse_server.rpc.access.tokens import TokenFile

_logger = logging.getLogger("icehouse_server.rpc.access.credentials")


class Security:
    """What the server shows of itself and wants to see of others. Owned by the event loop."""

    def __init__(self, config: SecurityConfig, *, clock: Clock) -> None:
        self._interval_s = config.reload_s
        self._certificates = certificates_of(config)
        self._tokens = None if config.token_file is None else TokenFile(Path(config.token_file).expanduser())
        self._logged: dict[str, str] = {}
        self.credentials: grpc.ServerCredentials | None = None
        """What to listen with, once loaded; None is plain text."""
        self.authenticator = Authenticator(
            tokens=self._tokens,
            by_certificate=config.tls_client_ca is not None,
            operator_names=config.operator_names,
            clock=clock,
        )

    def load(self) -> None:
        """Read all files for the first time; raises StartError when one cannot be used."""
        if self._tokens is not None:
            self._refresh_tokens(self._tokens)
        if self._certificates is not None:
            self._certificates.refresh()
            self.credentials = self._certificates.credentials()
            if self._certificates.key_is_open_to_others:
                _logger.warning(
                    "open_private_key_read", extra={"detail": "other users may read it; chmod 600 mends that"}
                )

    async def run(self) -> None:
        """Look at the files at the interval, until cancelled."""
        while self._certificates is not None or self._tokens is not None:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Look at the files now. What cannot be used is logged once and changes nothing."""
        if self._certificates is not None:
            await self._refresh_one("certificate", self._certificates.refresh)
        if self._tokens is not None:
            await self._refresh_one("tokens", functools.partial(self._refresh_tokens, self._tokens))

    @staticmethod
    def _refresh_tokens(tokens: TokenFile) -> bool:
        changed = tokens.refresh()
        if changed and not tokens.token_count:
            _logger.warning("empty_token_file_read", extra={"detail": "nobody can call"})
        return changed

    async def _refresh_one(self, name: str, refresh: Callable[[], bool]) -> None:
        try:
            changed = await asyncio.to_thread(refresh)
        except StartError as error:
            if self._is_new(name, error.message):
                _logger.error(
                    "old_secrets_kept",
                    extra={"kind": name, "reason": error.reason.value, "detail": error.message},
                )
            return
        except Exception as error:
            # A fault of ours: the next look, at files that somebody may have mended, must come all the same.
            # Not the repr: that of an error in decoding holds the whole file.
            if self._is_new(name, detail := f"{type(error).__name__}: {error}"):
                _logger.exception("old_secrets_kept", extra={"kind": name, "detail": detail})
            return
        self._logged.pop(name, None)
        if changed:
            _logger.info("new_secrets_taken", extra={"kind": name})

    def _is_new(self, name: str, detail: str) -> bool:
        """Whether this was not what was wrong the last time."""
        was, self._logged[name] = self._logged.get(name), detail
        return was != detail
