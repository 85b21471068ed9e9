"""First words: on a terminal a start shows its progress instead of its log, and at the end where to connect.

They are made from log events. Requests, warnings and errors are logged as usual.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from icehouse_client.cli.connection import DEFAULT_ADDRESS
from icehouse_client.cli.console import err
from icehouse_client.cli.figures import size_text
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from icehouse_server.config import LoadedConfig

_SPINNER = "dots"
_ACCESS_LOG = "icehouse.access"
_CHECKING = "Checking port and cache directory"


@contextlib.contextmanager
def first_words(loaded: LoadedConfig) -> Iterator[None]:
    """Show the start that the block makes, if stderr is a terminal and the log settings are the defaults."""
    is_default = all(loaded.sources[key] == "default" for key in ("log.level", "log.format"))
    if not (err.is_terminal and is_default):
        yield
        return
    words = FirstWords(err)
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(_is_for_people)
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(_AboveSpinner())
    root.addHandler(words)
    try:
        words.begin()
        yield
    finally:
        words.end()


class FirstWords(logging.Handler):
    """Shows events of the start as words. Records may come from any thread."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._status: Status | None = None
        self._model = "the model"
        self._has_begun = False

    def begin(self) -> None:
        """Show the spinner."""
        self._show(_CHECKING)

    def end(self) -> None:
        """Remove the spinner."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def emit(self, record: logging.LogRecord) -> None:
        fields = vars(record)
        match record.getMessage():
            case "hub_searched":
                self._show(f"Looking up {fields['model']} on the hub")
            case "download_started":
                # The hub's library has its own bars, which a spinner would garble.
                self.end()
                self._say(f"Downloading {fields['model']} ({size_text(fields['size_bytes'])})")
            case "model_found":
                # A demo model's size is known only after it was built.
                size = f" ({size_text(fields['size_bytes'])})" if fields["size_bytes"] else ""
                self._model = f"{fields['model']}{size}"
                self._show("Reading the tokenizer")
            case "tokenizer_read":
                self._show(f"Loading {self._model}")
            case "weights_read":
                self._show("Warming up")
            case "serving_started":
                self.end()
                self._has_begun = True
                self._say(ready_text(fields["address"], fields.get("http")))
            case "drain_started":
                self.end()
                self._say("Stopping: running calls finish first; a second Ctrl-C ends at once")
            case "server_drained":
                self._say("Stopped")

    def _show(self, text: str) -> None:
        if self._has_begun:
            # Later loading of a model is reported to the callers that wait for it.
            return
        if self._status is None:
            self._status = self._console.status("", spinner=_SPINNER)
            self._status.start()
        # Naming the spinner draws it at once: some steps take almost no time.
        self._status.update(f"{escape(text)} …", spinner=_SPINNER)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def ready_text(address: str, http_url: str | None) -> str:
    """Return where the server is, and a command to try: `Ready: localhost:50051 · try: icehouse chat`."""
    shown = _named(address)
    asked = "icehouse chat" if shown == DEFAULT_ADDRESS else f"icehouse chat --address {shown}"
    http = [] if http_url is None else [f"{_named(http_url)}/v1"]
    return " · ".join([f"Ready: {shown}", *http, f"try: {asked}"])


def _named(address: str) -> str:
    return address.replace("127.0.0.1:", "localhost:")


def _is_for_people(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name == _ACCESS_LOG


class _AboveSpinner:
    """The current standard error: while a spinner runs, lines are written above it."""

    def write(self, text: str) -> Any:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
