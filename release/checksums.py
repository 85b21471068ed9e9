"""Checksums of a release: SHA256SUMS, which `sha256sum -c` reads, and a check that also finds what is extra.

Usage: python -m release.checksums FOLDER. Nothing outside the folder is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "SHA256SUMS"


def digest_of(path: Path) -> str:
    """Return a file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path) -> None:
    """Write the sums of every file below the folder."""
    lines = [f"{digest_of(folder / name)}  {name}\n" for name in _names(folder)]
    (folder / NAME).write_text("".join(lines), encoding="utf-8")


def faults_of(folder: Path) -> Iterator[str]:
    """Yield each file that is missing, differs, or has no sum."""
    lines = (folder / NAME).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    there = set(_names(folder))
    for name in sorted(sums.keys() | there):
        if name not in there:
            yield f"{name}: missing"
        elif name not in sums:
            yield f"{name}: not in {NAME}"
        elif sums[name] != digest_of(folder / name):
            yield f"{name}: not what was released"


def _names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    return sorted(path.relative_to(folder).as_posix() for path in files)


def main() -> None:
    """Check a folder; what is wrong is the exit message."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if wrong := list(faults_of(folder)):
        sys.exit("\n".join(wrong))
    print(f"{folder}: every file is what was released")


if __name__ == "__main__":
    main()
