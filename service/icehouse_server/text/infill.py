"""Infill prompt: the tokens by which a model fills the gap between two texts.

Fill in the middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"):
prefix, suffix, then the middle, with a token of the vocabulary before each. The names of these tokens differ,
so those in the vocabulary show the model's format.
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
"""More tokens that end a middle, beside the model's end tokens and the markers: some models have one for it,
others go on with the next file."""
_PROBE = "☺"
"""Meta's own code for CodeLlama puts it in front of a suffix, and takes its tokens away again."""


@dataclasses.dataclass(frozen=True, slots=True)
class InfillTokens:
    """A prompt with a gap; the model continues it with what fills the gap."""

    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    """What ends the middle, beside the model's end tokens."""


_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""What stands before the prefix, the suffix and the middle, by family."""


@dataclasses.dataclass(frozen=True, slots=True)
class InfillFormat:
    """One model's prompt format for filling a gap. Any thread."""

    marker_ids: tuple[int, int, int]
    stop_token_ids: tuple[int, ...]
    has_implicit_space: bool
    """Whether its tokenizer puts a space in front of every text."""
    encode: Encode
    """Gives the tokens of a text by itself."""
    start: tuple[int, ...]
    """Tokens that begin every prompt of the model."""

    def tokens(self, *, prefix: str, suffix: str) -> InfillTokens:
        """Return the prompt of a gap between two texts."""
        prefix_id, suffix_id, middle_id = self.marker_ids
        before, behind = self.encode(prefix), self._bare(suffix)
        token_ids = (*self.start, prefix_id, *before, suffix_id, *behind, middle_id)
        return InfillTokens(token_ids, self.stop_token_ids)

    def _bare(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on without a space in front."""
        if not self.has_implicit_space:
            return self.encode(text)
        probe, whole = self.encode(_PROBE), self.encode(_PROBE + text)
        return whole[len(probe) :] if whole[: len(probe)] == probe else self.encode(text)


def infill_format_of(
    vocabulary: Mapping[str, int], *, encode: Encode, start: tuple[int, ...]
) -> InfillFormat | None:
    """Return how the model of a vocabulary fills gaps; None where its vocabulary has no markers for it."""
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
