"""Response format: the form of an output, and the grammar that enforces it.

Formats are hashable, because compiled ones are looked up by their format.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icehouse_server.errors import IcehouseError


@dataclasses.dataclass(frozen=True, slots=True)
class JsonSchema:
    """One JSON value that validates against `schema` (JSON text); properties come in the schema's order."""

    schema: str
    is_compact: bool = False
    """Whether there is no white space between JSON tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class JsonObject:
    """Any one JSON object."""

    is_compact: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Regex:
    """Text that `pattern` (in Rust's syntax) matches as a whole."""

    pattern: str


@dataclasses.dataclass(frozen=True, slots=True)
class LarkGrammar:
    """Text that the rule `start` of a grammar in llguidance's Lark dialect derives."""

    grammar: str


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts, in full."""

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class JsonTag:
    """JSON between two fixed texts, such as one tool's call in a model's own notation.

    `begin` and `end` may spell special tokens of the model's vocabulary, which are then drawn as tokens.
    """

    begin: str
    schema: str
    """The JSON schema (JSON text) of the value in between."""
    end: str = ""
    field: str = ""
    """The request's field of the schema, for errors."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaggedJson:
    """At least one of `tags`, and nothing else except as allowed below."""

    tags: tuple[JsonTag, ...]
    may_repeat: bool = False
    """Whether several tags may follow each other, with white space between them."""
    trigger: str = ""
    """The common beginning of all `begin`s. With a trigger an output may be text without tags, or have text
    before and after tags. Every occurrence of the trigger begins a tag; without `may_repeat` only one may."""
    markers: tuple[str, ...] = ()
    """Special tokens that text may contain; only for a form with a trigger."""
    opening: str = ""
    """The part of the first tag's `begin` that the prompt ends with; all `begin`s start with it."""
    answer: JsonSchema | JsonObject | None = None
    """What an output may be instead of tags; only for a form without trigger and opening."""


ResponseFormat = JsonSchema | JsonObject | Regex | LarkGrammar | Choice | TaggedJson


def size_bytes(form: ResponseFormat) -> int:
    """Return the size of a form's text in UTF-8; each text of a choice counts at least one byte."""
    match form:
        case JsonSchema():
            texts: tuple[str, ...] = (form.schema,)
        case JsonObject():
            texts = ()
        case Regex():
            texts = (form.pattern,)
        case LarkGrammar():
            texts = (form.grammar,)
        case Choice():
            return sum(max(1, len(text.encode("utf-8"))) for text in form.texts)
        case TaggedJson():
            texts = tuple(text for tag in form.tags for text in (tag.begin, tag.schema, tag.end))
            texts += (form.trigger, *form.markers)
            texts += (form.answer.schema,) if isinstance(form.answer, JsonSchema) else ()
    return sum(len(text.encode("utf-8")) for text in texts)


class Constraint(Protocol):
    """Decides which tokens may come next. One per sequence, used on the inference thread only.

    After a sequence was parked, it gets a new constraint, which is given the output so far.
    """

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: nothing may follow, and `allowed_tokens` is not called again."""

    @property
    def error(self) -> IcehouseError | None:
        """Why it cannot continue; its sequence then ends with this error."""

    @property
    def allows_any(self) -> bool:
        """Whether every token may come next; `allowed_tokens` is then not called."""

    def allows(self, token_id: int) -> bool:
        """Return whether one token may come next, at far less cost than `allowed_tokens`.

        It allows everything that `allowed_tokens` does. If only one text can follow, `allowed_tokens` may
        have one spelling of it, while this allows others too.
        """

    def allowed_tokens(self) -> npt.NDArray[np.uint32]:
        """Return the tokens that may come next, one bit each: token i is bit i % 32 of word i // 32.

        At least one bit is set. Tokens after the last word are not allowed. The array is read before the next
        call.
        """

    def accept(self, token_id: int) -> None:
        """Advance by a token that was drawn."""


class Grammar(Protocol):
    """A form that is ready for use. Immutable; any number of sequences on any thread may start from it."""

    @property
    def unenforced(self) -> tuple[str, ...]:
        """JSON pointers of the keywords in the form's schemas that are not enforced."""

    def start(self) -> Constraint:
        """Return a constraint for a new output, owned by the caller's thread."""
