"""Version of everything: written by hand in pyproject.toml alone, and from there into every other place.

Usage: python -m release.version [X.Y.Z]. Without a version it names the places that say another one than
pyproject.toml, and fails where there are any; with one it writes it everywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_VERSION = r"\d+\.\d+\.\d+"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the version stands in a file: what comes right before it, and how often that is there."""

    path: str
    before: str
    """A regular expression."""
    count: int = 1

    @property
    def pattern(self) -> re.Pattern[str]:
        """What finds the version, as its only group."""
        return re.compile(rf"(?:{self.before})({_VERSION})", re.MULTILINE)


SOURCE = Place("pyproject.toml", r'^version = "')
PLACES = (
    SOURCE,
    Place("pyproject.toml", r'"icehouse-(?:client\[cli\]|http|protos)==', count=3),
    Place("gen/python/pyproject.toml", r'^version = "'),
    Place("clients/python/pyproject.toml", r'^version = "'),
    Place("clients/python/pyproject.toml", r'"icehouse-protos=='),
    Place("clients/http/pyproject.toml", r'^version = "'),
    Place("clients/http/pyproject.toml", r'"icehouse-(?:client|protos)==', count=2),
    Place("clients/node/package.json", r'^  "version": "'),
    Place("clients/node/package-lock.json", r'"name": "icehouse-client",\n\s+"version": "', count=2),
    Place("clients/go/go.mod", r"^\ticehouse\.dev/api v"),
    Place("clients/go/README.md", r"icehouse\.dev/(?:icehouse|api)@v", count=4),
    Place("clients/java/pom.xml", r"<artifactId>icehouse-client</artifactId>\n  <version>"),
    Place("clients/java/README.md", r"<artifactId>icehouse-client</artifactId>\n\s+<version>"),
    Place("docs/releases.md", r"This is version "),
)


class VersionError(Exception):
    """A place that cannot be found, or a version that is none."""


def current(root: Path = ROOT) -> str:
    """Return the version that pyproject.toml has."""
    return _found(SOURCE, root)[0]


def stale(root: Path = ROOT) -> Iterator[str]:
    """Yield `path: version` of every place that says another one; raises VersionError for one not found."""
    wanted = current(root)
    for place in PLACES:
        for found in _found(place, root):
            if found != wanted:
                yield f"{place.path}: {found}, not {wanted}"


def write(version: str, root: Path = ROOT) -> None:
    """Write the version everywhere. Raises VersionError, with nothing written, for what all cannot hold."""
    if not re.fullmatch(_VERSION, version):
        raise VersionError(f"{version!r} is no version that pip, npm, Go and Maven read alike: X.Y.Z")
    for place in PLACES:
        _found(place, root)
    for place in PLACES:
        path = root / place.path
        text = path.read_text(encoding="utf-8")
        changed = place.pattern.sub(lambda match: match[0].removesuffix(match[1]) + version, text)
        path.write_text(changed, encoding="utf-8")


def _found(place: Place, root: Path) -> list[str]:
    found = place.pattern.findall((root / place.path).read_text(encoding="utf-8"))
    if len(found) != place.count:
        raise VersionError(f"{place.path} has {len(found)} versions after {place.before}, not {place.count}")
    return found


def main() -> None:
    """Check or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", help="X.Y.Z, to be written everywhere")
    version = parser.parse_args().version
    try:
        if version is not None:
            write(version)
        wrong = list(stale())
    except VersionError as error:
        sys.exit(f"version: {error}")
    if wrong:
        sys.exit("\n".join([*wrong, f"`python -m release.version {current()}` writes it everywhere"]))


if __name__ == "__main__":
    main()
