"""Grammar source: turns the form that a caller asked for into llguidance's text. Pure functions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable

from llguidance import LLMatcher

from icehouse_server.domain.response_format import (
    Choice,
    JsonObject,
    JsonSchema,
    JsonTag,
    LarkGrammar,
    Regex,
    ResponseFormat,
    TaggedJson,
)
from icehouse_server.structured_output.schema.references import FormMistake
from icehouse_server.structured_output.schema.rewriter import rewritten

Pieces = Callable[[str], Iterable[int | str]]
"""Splits a text into the special tokens that it spells and the text between them."""

UNENFORCED_LIMIT = 32
"""Most unenforced keywords that are reported."""
_POINTER_LENGTH = 256
_OPTIONS_KEY = "x-guidance"
_WHITE_SPACE = r" |\n[ \t]{0,32}"
"""White space between two JSON tokens: one space, or a line break and eight levels of indentation by four."""

_JSON_START = re.compile(r"\s*[\[{\"\-0-9tfn]")
_LEXEMES = ("WHITE: /[ \\t\\r\\n]{1,8}/", "TEXT: /(.|\\n)*/")


def grammar_source(form: ResponseFormat, *, pieces: Pieces) -> str:
    """Return the grammar of a form whose JSON has been read once already.

    Raises UnusableSchema, and ValueError for JSON that Python accepts but llguidance does not.
    """
    match form:
        case JsonSchema() | JsonObject():
            return LLMatcher.grammar_from_json_schema(_held_answer(form))
        case Regex():
            return LLMatcher.grammar_from_regex(form.pattern)
        case LarkGrammar():
            return LLMatcher.grammar_from_lark(form.grammar)
        case Choice():
            # One terminal for all texts: a rule may have only 2,000 alternatives.
            texts = " | ".join(map(json.dumps, dict.fromkeys(form.texts)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case TaggedJson():
            return LLMatcher.grammar_from_lark(_tagged_lark(form, pieces))


def unenforced(form: ResponseFormat) -> tuple[str, ...]:
    """Return the JSON pointers of the keywords in a form's schemas that are not enforced.

    Pointers into a tool's schema follow its field. Only the first UNENFORCED_LIMIT are returned.
    """
    match form:
        case JsonSchema():
            pointers: Iterable[str] = rewritten(json.loads(form.schema)).unenforced
        case TaggedJson():
            pointers = (
                f"{tag.field}{p}" for tag in form.tags for p in rewritten(json.loads(tag.schema)).unenforced
            )
            if form.answer is not None:
                pointers = (*unenforced(form.answer), *pointers)
        case _:
            pointers = ()
    first = itertools.islice(pointers, UNENFORCED_LIMIT)
    return tuple(p if len(p) <= _POINTER_LENGTH else f"…{p[1 - _POINTER_LENGTH :]}" for p in first)


def _held(schema: str, *, is_compact: bool = False) -> str:
    """Return a schema for llguidance, with the white space that an output may have."""
    options = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": _WHITE_SPACE}
    return json.dumps({**rewritten(json.loads(schema)).schema, _OPTIONS_KEY: options}, allow_nan=False)


def _held_answer(form: JsonSchema | JsonObject) -> str:
    schema = form.schema if isinstance(form, JsonSchema) else '{"type":"object"}'
    return _held(schema, is_compact=form.is_compact)


def _tagged_lark(form: TaggedJson, pieces: Pieces) -> str:
    if form.trigger:
        return _triggered_lark(form, pieces)
    names = [f"tag_{index}" for index in range(len(form.tags))]
    begun = " | ".join(f"begun_{name}" for name in names)
    more = f" (WHITE? ({' | '.join(names)}))*" if form.may_repeat else ""
    calls = f"({begun}){more}"
    lines = [*_LEXEMES, f"start: {calls}"]
    if form.answer is not None:
        for item in form.tags:
            first = next(iter(pieces(item.begin)))
            # llguidance takes the longest lexeme: an answer that begins as a call does would become one.
            if isinstance(first, str) and _JSON_START.match(first):
                raise FormMistake("calls of this model begin as JSON does, so that no answer can be in JSON")
        lines = [*_LEXEMES, f"start: {calls} | answer", f"answer: %json {_held_answer(form.answer)}"]
    for name, item in zip(names, form.tags, strict=True):
        lines.append(f"begun_{name}: {_body(item, pieces, begin=item.begin.removeprefix(form.opening))}")
        lines.append(f"{name}: {_body(item, pieces, begin=item.begin)}")
    return "\n".join(lines)


def _triggered_lark(form: TaggedJson, pieces: Pieces) -> str:
    """Return the grammar of text in which every trigger begins a tag.

    As in llguidance's structural tags, the lazy one of two matching lexemes wins.
    """
    markers = [piece for marker in form.markers for piece in pieces(marker) if isinstance(piece, int)]
    text = "TEXT"
    lines = [*_LEXEMES]
    if markers:
        lines.append(f"marked: TEXT ({' | '.join(_literal(marker) for marker in markers)})")
        text = "marked* TEXT"
    first, *rest = pieces(form.trigger)
    if isinstance(first, int):
        lead = f"{text} {_literal(first)}"
    else:
        lines.append(f"lead[lazy]: TEXT {_literal(first)}")
        lead = f"{'marked* ' if markers else ''}lead"
    tags = " | ".join(f"tag_{index}" for index in range(len(form.tags)))
    lines.append(f"call: {lead} {' '.join(_literal(piece) for piece in rest)} ({tags})")
    lines.append(f"start: call* {text}" if form.may_repeat else f"start: {text} | call WHITE?")
    lines += [
        f"tag_{index}: {_body(item, pieces, begin=item.begin.removeprefix(form.trigger))}"
        for index, item in enumerate(form.tags)
    ]
    return "\n".join(lines)


def _body(item: JsonTag, pieces: Pieces, *, begin: str) -> str:
    before, behind = map(_literal, pieces(begin)), map(_literal, pieces(item.end))
    return " ".join([*before, f"%json {_held(item.schema)}", *behind])


def _literal(piece: int | str) -> str:
    """Spell a token by its id, and text as Lark does, which is like JSON."""
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)
