"""Command line of whoever asks a server: `icehouse-client`, and the same commands of `icehouse`."""

import importlib.util

if importlib.util.find_spec("typer") is None:
    raise ModuleNotFoundError(
        "the command line is not installed: it is icehouse-client's extra `cli`", name="typer"
    )
