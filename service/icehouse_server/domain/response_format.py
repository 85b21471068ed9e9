"""Response format: the form that an output must have, and the grammar that enforces it.

Formats are hashable: a compiled one is looked up by its format.
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
    """No white space between the tokens of JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class JsonObject:
    """Any one JSON object."""

    is_compact: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Regex:
    """Text that `pattern` (Rust's syntax) matches from its beginning to its end."""

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

    `begin` and `end` may spell special tokens of the model's vocabulary; those are then tokens.
    """

    begin: str
    schema: str
    """A JSON schema (JSON text) for what is in between."""
    end: str = ""
    field: str = ""
    """The request's field of the schema, for errors."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaggedJson:
    """At least one of `tags`, and nothing else except as allowed below."""

    tags: tuple[JsonTag, ...]
    may_repeat: bool = False
    """Several may follow each other, white space between them."""
    trigger: str = ""
    """The common beginning of all `begin`s. With a trigger an output may be text without tags, or have text
    before and behind tags; every occurrence of the trigger begins a tag, without `may_repeat` only one."""
    markers: tuple[str, ...] = ()
    """Special tokens that text may contain; for a form with a trigger."""
    opening: str = ""
    """The part of the first `begin` that the prompt ends with; each of them begins with it."""
    answer: JsonSchema | JsonObject | None = None
    """What an output may be instead of tags; for a form without trigger and opening."""


ResponseFormat = JsonSchema | JsonObject | Regex | LarkGrammar | Choice | TaggedJson


def size_bytes(form: ResponseFormat) -> int:
    """Return how much text a form holds, in UTF-8; each text of a choice counts as one byte at least."""
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

    After a sequence was parked, a new one is given the output so far.
    """

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: nothing may follow, and `allowed_tokens` is not asked again."""

    @property
    def error(self) -> IcehouseError | None:
        """Why it cannot continue; its sequence then ends with this error."""

    @property
    def allows_any(self) -> bool:
        """Whether every token may come next; `allowed_tokens` is then not asked."""

    def allows(self, token_id: int) -> bool:
        """Return whether one token may come next, at far less cost than `allowed_tokens`.

        Where only one text can follow, `allowed_tokens` may name one spelling of it and this allow others;
        what `allowed_tokens` names is always allowed.
        """

    def allowed_tokens(self) -> npt.NDArray[np.uint32]:
        """Return the tokens that may come next, one bit each: token i is bit i % 32 of word i // 32.

        At least one bit is set. Tokens behind the last word are not allowed. The array is read before
        the next call.
        """

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was drawn."""


class Grammar(Protocol):
    """A form ready for use. Never changes; any number of sequences on any thread may start from it."""

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords of the form's schemas that outputs are not held to, by their JSON pointers."""

    def start(self) -> Constraint:
        """Return a constraint at the beginning of an output, owned by the caller's thread."""
