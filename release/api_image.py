"""Image of the API as the last release has it: what `buf breaking` holds protos/ against.

Usage: python -m release.api_image [--renew]. `make proto` runs it; without an option nothing is written, and
the exit code is 1 where something is gone or means another thing. `--renew` is a step of a release: it takes
protos/ as they are for released, and refuses where callers of the release before would break.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[1] / "protos"
IMAGE = PROTOS / "released.binpb"
_TIMEOUT_S = 60


class BrokenApi(Exception):
    """What of a release is gone or changed, as buf says it, one `file:line:column:what` a line."""


def check(protos: Path = PROTOS, image: Path = IMAGE) -> None:
    """Raise BrokenApi where `protos` break callers of the API in `image`."""
    if said := _buf("breaking", "--against", str(image.resolve()), folder=protos):
        raise BrokenApi(said)


def renew(protos: Path = PROTOS, image: Path = IMAGE) -> None:
    """Write `protos` to `image`; raises BrokenApi, and writes nothing, where they break the one before."""
    if image.exists():
        check(protos, image)
    if said := _buf("build", "--exclude-source-info", "-o", str(image.resolve()), folder=protos):
        raise BrokenApi(said)


def _buf(*arguments: str, folder: Path) -> str:
    """Return what buf has to complain of, nothing where all is well; buf is the one beside this Python."""
    buf = Path(sysconfig.get_path("scripts")) / "buf"
    command = [str(buf), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
    said = (done.stdout + done.stderr).strip()
    return said or f"`{' '.join(command)}` ended with {done.returncode}" if done.returncode else ""


def main() -> None:
    """Check or renew; what is broken is the exit message, and the exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", action="store_true", help="take protos/ for the last release from now on")
    try:
        renew() if parser.parse_args().renew else check()
    except BrokenApi as error:
        sys.exit(f"{error}\nthe API only grows: what a release had must stay, and mean the same")


if __name__ == "__main__":
    main()
