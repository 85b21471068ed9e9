"""Table of methods for docs/methods.md: what the server allows each of them."""

from __future__ import annotations

from icehouse_server.rpc.calls.methods import KIB, METHODS, Method


def markdown() -> str:
    """Return docs/methods.md."""
    return _PAGE.format(rows="\n".join(_line(name, row) for name, row in METHODS.items()))


_PAGE = """# Methods

What the server allows each method. Concurrent calls are limited by kind ("places"), for each tenant, or for
each connection without credentials. One tenant or connection gets at most three quarters of the places for
`work` (`server.max_concurrent_calls`), half of those for `commands` and a fifth of those for `watches`; its
share shrinks under load. Health checks have eight places for each connection. Some methods have a lower limit
of their own ("at once"). What is "charged" counts against a tenant's tokens per minute, if these are limited.
A call without a deadline ends with `DEADLINE_EXCEEDED` after the time under "ends after".

Presence in requests and answers: a scalar field is `optional` where its zero is a legal value that differs
from leaving the field out, such as `sampling.seed`. Everywhere else zero, false or empty means the default.
Lists come in pages: a `page_size` above the maximum is lowered to it.

| method | who | places | at once | done on | charged | request | arrives within | ends after |
|---|---|---|---|---|---|---|---|---|
{rows}

`make gen` writes this page from `service/icehouse_server/rpc/calls/methods.py`.
"""


def _line(name: str, row: Method) -> str:
    size = "`server.max_message_bytes`"
    if row.message_byte_limit is not None:
        size = f"{row.message_byte_limit // KIB} KiB"
    late = "`connection.message_timeout_s`"
    if row.message_timeout_s is not None:
        late = f"{row.message_timeout_s:g} s"
    end = "never" if row.deadline_s is None else _duration(row.deadline_s)
    few = "any" if row.caller_limit is None else str(row.caller_limit)
    cells = (f"`{name}`", row.access, row.pool, few, row.thread, row.cost, size, late, end)
    return f"| {' | '.join(cells)} |"


def _duration(seconds: float) -> str:
    for unit, length_s in (("h", 3600), ("min", 60)):
        if not seconds % length_s:
            return f"{seconds / length_s:g} {unit}"
    return f"{seconds:g} s"
