"""`icehouse config`: the effective settings and where each came from."""

from __future__ import annotations

from operator import attrgetter

from service.cli.console import out
from service.cli.flags import value_text
from service.config import SETTINGS, LoadedConfig


def show_config(loaded: LoadedConfig) -> None:
    """Print every setting with its effective value and its source (flag, variable, file or default)."""
    rows = [
        (
            setting.key,
            value_text(setting, attrgetter(setting.key)(loaded.config)),
            loaded.sources[setting.key],
        )
        for setting in SETTINGS
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, source in rows:
        line = f"{key:{widths[0]}}  {value:{widths[1]}}  {source}"
        out.print(line, markup=False, style="dim" if source == "default" else "bold")
