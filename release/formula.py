"""Homebrew formula of a release: the server and all it needs as wheels with their sums, below one address.

It is made, not committed: it names where the artifacts of a release are, and no registry. Everything it
fetches lies in the release's own folders `python` and `homebrew/wheels`, as built and as pinned by
constraints.txt, so that a Mac installs what was tested and asks nobody else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from release.checksums import digest_of

PYTHON = "3.11"
"""What the wheels are for; the tests run on it."""

MACOS = "sonoma"
"""macOS 14: the oldest that mlx has wheels for."""

WHEEL_PLATFORM = "macosx_14_0_arm64"

_TEMPLATE = Path(__file__).with_name("icehouse.rb.in")
_RESOURCE = """\
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{digest}"
  end
"""


class FormulaError(Exception):
    """What a formula cannot be made of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel of a release, and where it can be fetched."""

    path: Path
    url: str

    @property
    def name(self) -> str:
        """The distribution's name, normalized."""
        return re.sub(r"[-_.]+", "-", self.path.name.partition("-")[0]).lower()

    @property
    def fits(self) -> bool:
        """Whether it installs on the Macs that the formula is for."""
        python, abi, platforms = self.path.stem.split("-")[-3:]
        # A wheel of the stable ABI is for its Python and every later one.
        number = PYTHON.replace(".", "")
        is_python = any(tag in ("py3", f"py{number}", f"cp{number}") for tag in python.split(".")) or (
            abi == "abi3" and any(re.fullmatch(r"cp3\d+", t) and int(t[3:]) <= 11 for t in python.split("."))
        )
        return is_python and any(_is_for_macs(tag) for tag in platforms.split("."))


def formula(*, version: str, release: Path, artifact_url: str, project_url: str) -> str:
    """Return the formula's text for the release in a folder, which will be at `artifact_url`.

    Raises FormulaError for an address that is none, and for wheels that no such Mac can install.
    """
    for url in (artifact_url, project_url):
        if not _is_address(url):
            raise FormulaError(f"{url!r} is no https address")
    wheels = [
        Wheel(path, f"{artifact_url.rstrip('/')}/{quote(path.relative_to(release).as_posix())}")
        for folder in ("python", "homebrew/wheels")
        for path in sorted((release / folder).glob("*.whl"))
    ]
    if unfit := [wheel.path.name for wheel in wheels if not wheel.fits]:
        raise FormulaError(f"no Mac with Python {PYTHON} can install {', '.join(unfit)}")
    main = [wheel for wheel in wheels if wheel.name == "icehouse"]
    if len(main) != 1 or f"-{version}-" not in main[0].path.name:
        raise FormulaError(f"{release} has {len(main)} wheels of icehouse {version}")
    return _filled(version, main[0], [wheel for wheel in wheels if wheel is not main[0]], project_url)


def _filled(version: str, main: Wheel, others: Sequence[Wheel], project_url: str) -> str:
    names = [wheel.name for wheel in others]
    if twice := {name for name in names if names.count(name) > 1}:
        raise FormulaError(f"more than one wheel of {', '.join(sorted(twice))}")
    resources = [
        _RESOURCE.format(name=wheel.name, url=wheel.url, digest=digest_of(wheel.path)) for wheel in others
    ]
    values = {
        "homepage": project_url,
        "url": main.url,
        "version": version,
        "sha256": digest_of(main.path),
        "python": PYTHON,
        "macos": MACOS,
        "resources": "\n".join(resources).rstrip("\n"),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    # Nothing that would end a Ruby string, or begin code in one.
    return parts.scheme == "https" and bool(parts.netloc) and not re.search(r"[\"'\\#{}\s]", url)


def _is_for_macs(tag: str) -> bool:
    found = re.fullmatch(r"macosx_(\d+)_\d+_(arm64|universal2)", tag)
    return tag == "any" or (found is not None and int(found[1]) <= 14)
