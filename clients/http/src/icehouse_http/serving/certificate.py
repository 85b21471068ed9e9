"""Certificate of HTTPS: read again when its files change, so that a renewed one needs no restart."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import ssl
from pathlib import Path

from icehouse_http.serving.logs import LOGGER_NAME

_log = logging.getLogger(LOGGER_NAME)


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """What HTTPS is spoken with."""

    certificate: Path
    key: Path

    def state(self) -> tuple[tuple[int, int], ...]:
        """Return what changes when a file is replaced; raises OSError."""
        found = [os.stat(path) for path in (self.certificate, self.key)]
        return tuple((each.st_ino, each.st_mtime_ns) for each in found)


class CertificateWatch:
    """Brings new files into the context that connections are made with; open ones keep theirs."""

    def __init__(self, files: TlsFiles, context: ssl.SSLContext) -> None:
        self._files = files
        self._context = context
        self._seen = files.state()
        self._is_failing = False

    async def look(self) -> None:
        """Take the files if they have changed and belong together; else keep the old pair and say so once."""
        try:
            # In a thread, since a network disk may hang.
            is_new = await asyncio.to_thread(self._refresh)
        except OSError as error:  # ssl.SSLError is one, too
            if not self._is_failing:
                _log.error("http_certificate_kept", extra={"detail": str(error)})
            self._is_failing = True
        else:
            self._is_failing = False
            if is_new:
                _log.info("http_certificate_taken")

    def _refresh(self) -> bool:
        state, files = self._files.state(), self._files
        if state == self._seen:
            return False
        # Half of a new pair would spoil the context in use, so another one tries it first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key)
        self._context.load_cert_chain(files.certificate, files.key)
        self._seen = state
        return True
