"""READMEs of packages: their links into the repository lead nowhere for who has the package alone.

In a checkout and on the site such links are relative. In a package one to the README of all becomes the
project's address, another one the place where files of this version are shown; without these only its
words stay.
"""

from __future__ import annotations

import posixpath
import re

_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^()\s#]+)(#[^()\s]*)?\)")
_HOME = "README.md"


def stand_alone(text: str, folder: str, *, project_url: str | None, pages_url: str | None) -> str:
    """Return a README's text without relative links.

    `folder` is the README's, from the root; below `pages_url` the files of the repository can be read.
    """

    def lead(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == _HOME and project_url is not None:
            return f"[{words}]({project_url}{anchor})"
        if pages_url is not None:
            return f"[{words}]({pages_url.rstrip('/')}/{path}{anchor})"
        return words

    # What is between the matches of code comes at even places.
    parts = _CODE.split(text)
    return "".join(part if index % 2 else _LINK.sub(lead, part) for index, part in enumerate(parts))
