"""Command line of whoever asks a server: `icehouse-client`, and the same commands of `icehouse`."""

import importlib.util
import os

if importlib.util.find_spec("typer") is None:
    raise ModuleNotFoundError(
        "the command line is not installed; install icehouse-client's extra `cli`", name="typer"
    )

# gRPC's C core writes lines of its own unless it finds this at its import; our errors say what they would.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
