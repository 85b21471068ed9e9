"""Guessing several tokens a step: what to give as `speculation`. The output is the same."""

from __future__ import annotations

from icehouse.v1 import speculation_pb2

Speculation = speculation_pb2.Speculation


def prompt_lookup(*, draft_tokens: int = 0, ngram_tokens: int = 0) -> Speculation:
    """Guess what followed the last tokens where they stood before; 0 leaves a number to the server."""
    return Speculation(
        prompt_lookup=speculation_pb2.PromptLookup(max_ngram_tokens=ngram_tokens),
        max_draft_tokens=draft_tokens,
    )


def draft_model(*, draft_tokens: int = 0) -> Speculation:
    """Guess with the server's draft model; without one the request decodes plainly and its usage says so."""
    return Speculation(draft_model=speculation_pb2.DraftModel(), max_draft_tokens=draft_tokens)
