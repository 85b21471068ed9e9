"""Group of commands whose module is imported when one of them is wanted.

What looks into the SSD tier imports NumPy and SQLite, which were half of what `icehouse --help` took.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from icehouse_client.cli.main import PlainGroup
from typer.main import get_group


def group_in(module: str) -> type[PlainGroup]:
    """Return a class for a group of the commands that `app` has in a module of that name."""

    @functools.cache
    def group() -> Any:
        return get_group(importlib.import_module(module).app)

    class LaterGroup(PlainGroup):
        @property
        def commands(self) -> Any:
            return group().commands

        @commands.setter
        def commands(self, given: Any) -> None:
            """Take the commands that a group is made with, which are none here."""

    return LaterGroup
