"""Infill prompt: the tokens that make a model fill the gap between two texts.

Fill in the middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"):
prefix, suffix, then the middle, each after a marker token. Families name these tokens differently, so a
vocabulary shows which format its model uses.
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
"""Other tokens that end a middle, besides the model's end tokens and the markers: some models have one for
this, others continue with the next file."""
_PROBE = "☺"
"""As in Meta's own code for CodeLlama: put it before a suffix, encode, and remove its tokens again."""


@dataclasses.dataclass(frozen=True, slots=True)
class InfillTokens:
    """A prompt with a gap; the model continues it with what fills the gap."""

    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    """Tokens that end the middle, besides the model's end tokens."""


_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""The markers before the prefix, the suffix and the middle, by family."""


@dataclasses.dataclass(frozen=True, slots=True)
class InfillFormat:
    """One model's prompt format for filling a gap. Any thread."""

    marker_ids: tuple[int, int, int]
    stop_token_ids: tuple[int, ...]
    has_implicit_space: bool
    """Whether its tokenizer puts a space in front of every text."""
    encode: Encode
    """Returns the tokens of a text alone, without special tokens."""
    start: tuple[int, ...]
    """Tokens that begin every prompt of the model."""

    def tokens(self, *, prefix: str, suffix: str) -> InfillTokens:
        """Return the prompt for the gap between two texts."""
        prefix_id, suffix_id, middle_id = self.marker_ids
        before, behind = self.encode(prefix), self._bare(suffix)
        token_ids = (*self.start, prefix_id, *before, suffix_id, *behind, middle_id)
        return InfillTokens(token_ids, self.stop_token_ids)

    def _bare(self, text: str) -> list[int]:
        """Return the tokens of a text without a space in front."""
        if not self.has_implicit_space:
            return self.encode(text)
        probe, whole = self.encode(_PROBE), self.encode(_PROBE + text)
        return whole[len(probe) :] if whole[: len(probe)] == probe else self.encode(text)


def infill_format_of(
    vocabulary: Mapping[str, int], *, encode: Encode, start: tuple[int, ...]
) -> InfillFormat | None:
    """Return the infill format that a vocabulary shows; None if it has no infill markers."""
    for names in _MARKERS:
        if vocabulary.keys() >= set(names):
            prefix_id, suffix_id, middle_id = (vocabulary[name] for name in names)
            ends = (vocabulary[name] for name in _ENDS if name in vocabulary)
            return InfillFormat(
                (prefix_id, suffix_id, middle_id),
                stop_token_ids=(prefix_id, suffix_id, middle_id, *ends),
                has_implicit_space=names[0] == "▁<PRE>",
                encode=encode,
                start=start,
            )
    return None
