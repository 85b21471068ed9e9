"""Group of commands whose module is imported when one of them is needed.

The module for the SSD tier imports NumPy and SQLite, which took half of the time of `icehouse --help`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from icehouse_client.cli.main import PlainGroup
from typer.main import get_group


def group_in(module: str) -> type[PlainGroup]:
    """Return a class for a group of the commands in the `app` of the module with this name."""

    @functools.cache
    def group() -> Any:
        return get_group(importlib.import_module(module).app)

    class LaterGroup(PlainGroup):
        @property
        def commands(self) -> Any:
            return group().commands

        @commands.setter
        def commands(self, given: Any) -> None:
            """Ignore the commands that the group is created with: there are none."""

    return LaterGroup
