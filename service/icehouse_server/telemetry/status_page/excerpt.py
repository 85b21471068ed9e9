"""Excerpt: how the text of some tokens begins, as one short line that is safe to show.

The tokens are what callers sent or a model drew, so the text may be anything: what comes out is printable,
has no line breaks and nothing that turns the direction of what stands around it. It is not markup: whoever
shows it escapes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from icehouse_server.domain.blocks import TokenKeys, image_runs

Decode = Callable[[Sequence[int]], str]

CHARACTER_LIMIT = 80
HEAD_TOKEN_LIMIT = 128
"""Tokens that are looked at: enough for that many characters, but where each one takes several tokens."""

_CUT = "…"
_IMAGE = "[image]"
_REPLACEMENT = "\ufffd"
_CUT_LIMIT = 3
"""Tokens at either end that may hold a part of a character: it has four bytes at most."""
_JOINERS = "\u200c\u200d"
"""Format characters that scripts and emoji need, and that show nothing by themselves."""


def excerpt(keys: TokenKeys, decode: Decode, *, is_whole: bool) -> str:
    """Return how the text of these tokens begins; `is_whole` says that no others follow."""
    line = _line(" ".join(_pieces(keys[:HEAD_TOKEN_LIMIT], decode)))
    is_whole = is_whole and len(keys) <= HEAD_TOKEN_LIMIT and len(line) <= CHARACTER_LIMIT
    return line[:CHARACTER_LIMIT] + ("" if is_whole else _CUT)


def _pieces(keys: TokenKeys, decode: Decode) -> Iterator[str]:
    """Yield the texts between images, and a word for each image: its tokens have no text of their own."""
    reached = 0
    for run in image_runs(keys):
        yield _whole_characters(keys[reached : run.start], decode)
        yield _IMAGE
        reached = run.start + run.token_count
    yield _whole_characters(keys[reached:], decode)


def _whole_characters(token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text without what is left of characters that were cut at either end.

    A decoder may give up on all bytes of a run where one of them is missing, so the tokens of the cut
    character are left away before they are decoded.
    """
    cuts = sorted(itertools.product(range(_CUT_LIMIT + 1), repeat=2), key=sum)
    for before, behind in cuts:
        text = decode(token_ids[before : max(before, len(token_ids) - behind)])
        if not (text.startswith(_REPLACEMENT) or text.endswith(_REPLACEMENT)):
            return text
    return decode(token_ids).strip(_REPLACEMENT)


def _line(text: str) -> str:
    """Return the text on one line; what controls the terminal, the line or its direction shows as U+FFFD."""
    return "".join(
        character if character.isprintable() or character in _JOINERS else _REPLACEMENT
        for character in " ".join(text.split())
    )
