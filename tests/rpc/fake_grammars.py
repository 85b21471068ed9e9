"""A compiler that takes any form, and waits where a test says so."""

from __future__ import annotations

import threading
from typing import Any

from icehouse_server.domain.response_format import Regex, ResponseFormat
from icehouse_server.errors import InvalidRequest, Reason

HELD = Regex("held")
"""Compiles until `let_go` is set."""
WRONG = Regex("wrong")
"""Is refused."""


class FakeGrammars:
    """Implements GrammarPort; a grammar here is the form itself."""

    stack_bytes_per_byte = 4096

    def __init__(self) -> None:
        self.compiled: list[ResponseFormat] = []
        self.calls: list[str] = []
        self.held = threading.Event()
        self.let_go = threading.Event()

    def prepare(self) -> None:
        self.calls.append(threading.current_thread().name)

    def compile(self, form: ResponseFormat) -> Any:
        self.calls.append(threading.current_thread().name)
        if form == HELD:
            self.held.set()
            assert self.let_go.wait(30)
        if form == WRONG:
            metadata = {"place": "column 3", "detail": "it is wrong"}
            raise InvalidRequest(
                Reason.RESPONSE_FORMAT_INVALID,
                "response_format.regex cannot be used: it is wrong (at column 3)",
                field="response_format.regex",
                metadata=metadata,
            )
        self.compiled.append(form)
        return form
