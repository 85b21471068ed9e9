"""Signals that a rank sends itself at a moment of its life, named by what it is about to log."""

from __future__ import annotations

import itertools
import logging
import os
import signal

from icehouse_server.engine.runner.rank import Rank


def signal_at_record(number: int, at: int | str) -> None:
    """Have this process send itself a signal once: as it logs so many records, or this event."""
    make, count = logging.getLogRecordFactory(), itertools.count(1)

    def make_and_signal(*args: object, **fields: object) -> logging.LogRecord:
        record = make(*args, **fields)  # type: ignore[arg-type]
        if at in (next(count), record.msg):
            logging.setLogRecordFactory(make)
            os.kill(os.getpid(), number)
        return record

    logging.setLogRecordFactory(make_and_signal)


def die_in_join() -> None:
    """Have this process killed as it is about to join the ring."""

    def die(self: Rank) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Rank.join = die  # type: ignore[method-assign]
