"""The form an output must have, as the caller asked for it. Hashable: a compiled form is looked up by it."""

from __future__ import annotations

import dataclasses


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


@dataclasses.dataclass(frozen=True, slots=True)
class TaggedJson:
    """At least one of `tags`, and nothing else but what is allowed here."""

    tags: tuple[JsonTag, ...]
    may_repeat: bool = False
    """Several may follow each other, white space between them."""
    may_begin_with_text: bool = False
    """Any text may come before the first one, such as reasoning. It must contain no `begin`."""


ResponseFormat = JsonSchema | JsonObject | Regex | LarkGrammar | Choice | TaggedJson


def size_bytes(form: ResponseFormat) -> int:
    """Return how much text a form holds, in UTF-8."""
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
            texts = form.texts
        case TaggedJson():
            texts = tuple(text for tag in form.tags for text in (tag.begin, tag.schema, tag.end))
    return sum(len(text.encode("utf-8")) for text in texts)
