"""Step limit of a template: a template is a program of the model's author, and may never come to an end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

STEP_LIMIT = 200_000
"""Lines that a template may run through for a history of a few turns; the longest known take 2,000."""
_TEMPLATE_FILE = "<template>"
"""What Jinja calls the code that it makes of a template's text."""


class TemplateTooLong(Exception):
    """A template ran through more lines than any needs."""


@contextlib.contextmanager
def step_limit(line_count: int = STEP_LIMIT) -> Iterator[None]:
    """Raise TemplateTooLong out of a template of Jinja that runs through more lines, on this thread."""
    left = line_count

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise TemplateTooLong(f"more than {line_count} lines")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
