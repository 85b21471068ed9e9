"""Paths of this user's files."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """Return `icehouse` in the user's cache folder: XDG's on Linux, ~/Library/Caches on macOS.

    The folder is not created here.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "icehouse"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "icehouse"
