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
        def list_commands(self, ctx: Any) -> list[str]:
            return list(group().list_commands(ctx))

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return group().get_command(ctx, cmd_name)

    return LaterGroup
