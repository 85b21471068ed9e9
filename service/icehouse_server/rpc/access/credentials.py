"""Credentials: certificates and tokens, read at start, looked at again at an interval."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
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

_SLOW_S = 10.0
"""A look that takes longer is told of."""


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
            self._certificates.refresh_authorities()
            self._certificates.refresh_pair()
            self.credentials = self._certificates.credentials()
            if self._certificates.key_is_open_to_others:
                _logger.warning(
                    "open_private_key_read", extra={"detail": "other users may read it; chmod 600 mends that"}
                )

    async def run(self) -> None:
        """Look at the files at the interval, each kind by itself, until cancelled."""
        async with asyncio.TaskGroup() as looks:
            for name, refresh in self._refreshes().items():
                looks.create_task(self._keep_looking(name, refresh), name=f"security of {name}")

    async def _keep_looking(self, name: str, refresh: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._refresh_one(name, refresh)

    async def refresh(self) -> None:
        """Look at the files now. What cannot be used is logged once and changes nothing."""
        await asyncio.gather(
            *(self._refresh_one(name, refresh) for name, refresh in self._refreshes().items())
        )

    def _refreshes(self) -> dict[str, Callable[[], bool]]:
        """Return what looks at each kind of file. Where one is out of reach, the others are looked at."""
        found: dict[str, Callable[[], bool]] = {}
        if self._tokens is not None:
            found["tokens"] = functools.partial(self._refresh_tokens, self._tokens)
        if self._certificates is not None:
            found["certificate"] = self._certificates.refresh_pair
            if self._certificates.has_authorities:
                found["authorities"] = self._certificates.refresh_authorities
        return found

    @staticmethod
    def _refresh_tokens(tokens: TokenFile) -> bool:
        changed = tokens.refresh()
        if changed and not tokens.token_count:
            _logger.warning("empty_token_file_read", extra={"detail": "nobody can call"})
        return changed

    async def _refresh_one(self, name: str, refresh: Callable[[], bool]) -> None:
        try:
            changed = await self._in_own_thread(name, refresh)
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

    async def _in_own_thread(self, name: str, refresh: Callable[[], bool]) -> bool:
        """Return what a look returns, however long it takes: a file may lie in a network that hangs.

        The thread is this look's alone and keeps nobody from ending, neither the others nor the process.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()

        def tell(end: Callable[[], object]) -> None:
            # By now the server may have ended, and the loop with it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: answer.done() or end())

        def look() -> None:
            try:
                changed = refresh()
            except Exception as error:
                tell(functools.partial(answer.set_exception, error))
            else:
                tell(functools.partial(answer.set_result, changed))

        threading.Thread(target=look, name=f"security-{name}", daemon=True).start()
        done, _ = await asyncio.wait({answer}, timeout=_SLOW_S)
        if not done:
            _logger.warning(
                "secrets_out_of_reach",
                extra={
                    "kind": name,
                    "waited_s": _SLOW_S,
                    "detail": "changes are not seen until the disk answers",
                },
            )
        return await answer

    def _is_new(self, name: str, detail: str) -> bool:
        """Whether this was not what was wrong the last time."""
        was, self._logged[name] = self._logged.get(name), detail
        return was != detail
