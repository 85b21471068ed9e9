"""Named paths: a setting that names folders, as a table in the file, "name=folder,name=folder" elsewhere."""

from __future__ import annotations

import dataclasses
import re

_NAME = re.compile(r"[A-Za-z0-9._:\-]{1,64}")
_COUNT_LIMIT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPath:
    """A folder and the name by which callers know it."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def read_named_paths(raw: object) -> tuple[NamedPath, ...]:
    """Return the folders in the order given; raises ValueError with a complaint that follows the value."""
    if isinstance(raw, tuple):
        return raw
    if isinstance(raw, dict):
        pairs = [(str(name), path) for name, path in raw.items()]
    elif isinstance(raw, str):
        parts = [part.partition("=") for part in raw.split(",") if part.strip()]
        pairs = [(name.strip(), path.strip()) for name, _, path in parts]
    else:
        raise ValueError("is neither a table of folders nor a text such as name=folder,name=folder")
    if len(pairs) > _COUNT_LIMIT:
        raise ValueError(f"names {len(pairs)} folders, and the limit is {_COUNT_LIMIT}")
    seen: set[str] = set()
    for name, path in pairs:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"has the name {name!r}; names are 1 to 64 of A-Z a-z 0-9 . _ : -")
        if name in seen:
            raise ValueError(f"names {name!r} twice")
        if not isinstance(path, str) or not path:
            raise ValueError(f"names no folder for {name!r}; write name=folder")
        seen.add(name)
    return tuple(NamedPath(name, path) for name, path in pairs)
