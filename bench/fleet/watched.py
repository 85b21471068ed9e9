"""Watched program: a Python module run as a command that is killed when whoever started it is gone.

`python -m bench.fleet.watched MODULE ARGUMENT...`; its standard input is a pipe that nobody writes to, and
that ends with the process at its other end, however that went.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Be the module's command line."""
    threading.Thread(target=_end_behind_input, name="parent watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_behind_input() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
