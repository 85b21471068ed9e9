"""Log probabilities in the forms of chat and of completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from icehouse_client import TokenLogprobs

_SPELLINGS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
"""Vocabularies' own signs for white space."""


def token_text(piece: str) -> str:
    """Return a token as one reads it. It is only for display: a token can be part of a character."""
    return piece.translate(_SPELLINGS)


def chat_logprobs(entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return them as chat has them. Bytes are not told."""
    content = [
        {
            **_entry(entry.piece, entry.logprob),
            "top_logprobs": [_entry(top.piece, top.logprob) for top in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return them as completions have them. Offsets count bytes of UTF-8."""
    told = list(entries)
    return {
        "tokens": [token_text(entry.piece) for entry in told],
        "token_logprobs": [entry.logprob for entry in told],
        "top_logprobs": [{token_text(top.piece): top.logprob for top in entry.top} for entry in told],
        "text_offset": [entry.text_offset or 0 for entry in told],
    }


def _entry(piece: str, logprob: float) -> dict[str, Any]:
    return {"token": token_text(piece), "logprob": logprob, "bytes": None}
