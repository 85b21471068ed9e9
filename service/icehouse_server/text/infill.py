"""Infill prompt: what stands before a gap and behind it, as the tokens that a model fills it by.

Fill in the middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"):
prefix, suffix, then the middle, with a token of the vocabulary before each. Models differ in how these are
called, so which of them a vocabulary has says how its model is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

Encode = Callable[[str], list[int]]

_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<file_sep>",
    "▁<EOT>",
)
"""Tokens that end a middle, beside the model's own end tokens and the markers: some models have one of their
own for it, others go on with the next file."""
_PROBE = "☺"
"""Meta's own code for CodeLlama puts it in front of a suffix, and takes its tokens away again."""


@dataclasses.dataclass(frozen=True, slots=True)
class InfillTokens:
    """A prompt with a gap, ready to be continued with what fills it."""

    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    """What ends the middle, beside the model's end tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Markers:
    """One family's names."""

    prefix: str
    suffix: str
    middle: str
    has_implicit_space: bool = False
    """Whether its tokenizer puts a space in front of whatever it is given."""


_FAMILIES = (
    # Qwen2.5-Coder, CodeGemma.
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite Code.
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder.
    _Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek-Coder.
    _Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # CodeLlama.
    _Markers("▁<PRE>", "▁<SUF>", "▁<MID>", has_implicit_space=True),
)


class InfillFormat:
    """How one model is asked to fill a gap. `encode` gives the tokens of a text by itself. Any thread."""

    def __init__(
        self, markers: _Markers, vocabulary: Mapping[str, int], *, encode: Encode, start: tuple[int, ...]
    ) -> None:
        """`start` are the tokens that the model wants at every prompt's beginning."""
        names = (markers.prefix, markers.suffix, markers.middle)
        self._prefix_id, self._suffix_id, self._middle_id = (vocabulary[name] for name in names)
        ends = [vocabulary[name] for name in _ENDS if name in vocabulary]
        self._stop_token_ids = (self._prefix_id, self._suffix_id, self._middle_id, *ends)
        self._has_implicit_space = markers.has_implicit_space
        self._encode = encode
        self._start = start

    def tokens(self, *, prefix: str, suffix: str) -> InfillTokens:
        """Return the prompt of a gap between two texts."""
        before, behind = self._encode(prefix), self._bare(suffix)
        token_ids = (
            *self._start,
            self._prefix_id,
            *before,
            self._suffix_id,
            *behind,
            self._middle_id,
        )
        return InfillTokens(token_ids, self._stop_token_ids)

    def _bare(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on without a space in front."""
        if not self._has_implicit_space:
            return self._encode(text)
        probe, whole = self._encode(_PROBE), self._encode(_PROBE + text)
        return whole[len(probe) :] if whole[: len(probe)] == probe else self._encode(text)


def infill_format_of(
    vocabulary: Mapping[str, int], *, encode: Encode, start: tuple[int, ...]
) -> InfillFormat | None:
    """Return how the model of a vocabulary fills gaps; None where nothing says that it was trained to."""
    for markers in _FAMILIES:
        if {markers.prefix, markers.suffix, markers.middle} <= vocabulary.keys():
            return InfillFormat(markers, vocabulary, encode=encode, start=start)
    return None
