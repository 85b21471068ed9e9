"""Grammar compiler for the response formats that callers ask for. Not for the inference thread or event loop.

Everything here except reading the vocabulary releases the GIL. llguidance recurses and cannot be interrupted.
So the caller bounds the size of a form (`STACK_BYTES_PER_BYTE` gives the stack that it needs), and forms that
are small but costly are refused here or by a probe process.

llguidance reports the line and column of a mistake in a Lark grammar, but no position in a JSON schema. That
position is found by compiling ever smaller parts of the schema.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import itertools
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from icehouse_server.domain.response_format import (
    Choice,
    JsonObject,
    JsonSchema,
    LarkGrammar,
    Regex,
    ResponseFormat,
    TaggedJson,
)
from icehouse_server.errors import InvalidRequest, Reason, clipped
from icehouse_server.structured_output.grammar_source import grammar_source, unenforced
from icehouse_server.structured_output.matcher import CompiledGrammar
from icehouse_server.structured_output.probe_process import ProbeProcess, ProbeSetup
from icehouse_server.structured_output.schema.references import (
    FormMistake,
    References,
    UnusableSchema,
    escaped,
    parts_of,
)

STACK_BYTES_PER_BYTE = 4096
"""Bytes of stack for each byte of a form. The worst form found, rules that only name the next rule in
parentheses, took 32 to 64 MiB for 64 KiB (llguidance 1.9.1, x86-64)."""

_LEAST_STACK_BYTES = 16 << 20

_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
"""A lexer state takes 1 to 2 kB, so this allows some 100 MB; the rest are llguidance's own limits."""

MULTIPLE_SUM_LIMIT = 100_000
"""Most that the divisors of one form may add up to. `multipleOf` builds that many states, and nothing can
stop it: a divisor of 1,000,003 took 5 s and 290 MB, one of 10,000,019 more than a minute (llguidance 1.9.1,
x86-64). The limit takes 0.4 s."""
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE_IN_TEXT = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')

_LARK_POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX_CARET = re.compile(r"^( *)\^", re.MULTILINE)
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_DEFINITION = "\n  while processing "
_REGEX_INDENT = 4
"""Spaces that regex-syntax puts before the pattern that it shows."""
_DETAIL_LENGTH_LIMIT = 240
_PROBE_BYTES = 1 << 20
"""Most text that is compiled to locate the faulty part; 1 MiB takes 2 s."""

_SHARED = frozenset({"$ref", "$defs", "definitions"})
"""Keywords that refer to or hold schemas that several parts share."""
_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties")

_FIELDS: dict[type[ResponseFormat], str] = {
    JsonSchema: "response_format.json_schema",
    JsonObject: "response_format.json_object",
    Regex: "response_format.regex",
    LarkGrammar: "response_format.lark",
    Choice: "response_format.choice",
    TaggedJson: "prompt.tools",
}


class VocabularySource(Protocol):
    """What the compiler needs from a tokenizer."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def vocabulary_json(self) -> str | None:
        """Return the vocabulary as tokenizer.json writes it; None if there is none."""
        ...


class GrammarCompiler:
    """Compiles forms to grammars over one model's vocabulary; the most recently used ones are cached.

    Any number of threads may use it. With `make_probe`, a form that is not cached is first compiled in
    another process; each thread that compiles at the same time gets its own.
    """

    def __init__(
        self,
        tokenizer: VocabularySource,
        *,
        vocabulary_size: int,
        cache_limit: int,
        make_probe: Callable[[ProbeSetup], ProbeProcess] | None = None,
    ) -> None:
        self._make_probe = make_probe
        self._probes: list[ProbeProcess] = []
        self._idle_probes: queue.LifoQueue[ProbeProcess] = queue.LifoQueue()
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._cache_limit = cache_limit
        self._cache: collections.OrderedDict[ResponseFormat, CompiledGrammar] = collections.OrderedDict()
        self._lock = threading.Lock()
        """Guards the cache. Held only for an instant, because the event loop takes it too."""
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: tuple[LLTokenizer, LLExecutor] | None = None

    @staticmethod
    def stack_bytes(form_bytes: int) -> int:
        """Return the stack that the calling thread needs for a form of this length."""
        return max(_LEAST_STACK_BYTES, form_bytes * STACK_BYTES_PER_BYTE)

    def compile(self, form: ResponseFormat) -> CompiledGrammar:
        """Return the grammar of a form; raises InvalidRequest with the position of the mistake."""
        if (cached := self.kept(form)) is not None:
            return cached
        self.prepare()
        self._probe(form)
        compiled = self._compile(form)
        with self._lock:
            self._cache[form] = compiled
            if len(self._cache) > self._cache_limit:
                self._cache.popitem(last=False)
        return compiled

    def kept(self, form: ResponseFormat) -> CompiledGrammar | None:
        """Return the cached grammar of a form."""
        with self._lock:
            cached = self._cache.get(form)
            if cached is not None:
                self._cache.move_to_end(form)
            return cached

    def close(self) -> None:
        """End the probe processes; a form that is being probed is refused. The compiler may be used again."""
        probes, self._probes, self._idle_probes = self._probes, [], queue.LifoQueue()
        for probe in probes:
            probe.close()

    def _probe(self, form: ResponseFormat) -> None:
        if self._make_probe is None:
            return
        idle = self._idle_probes  # `close` replaces the queue, and this probe must not return to the new one
        try:
            probe = idle.get_nowait()
        except queue.Empty:
            probe = self._make_probe(self._setup())
            self._probes.append(probe)
        try:
            probe.check(form, field=_FIELDS[type(form)])
        finally:
            idle.put(probe)

    def _compile(self, form: ResponseFormat) -> CompiledGrammar:
        field = _FIELDS[type(form)]
        vocabulary, executor = self.prepare()
        with _refusing(field):
            if isinstance(form, JsonSchema):
                _read_schema(form.schema, field=field)
            elif isinstance(form, LarkGrammar):
                _check_multiples(form.grammar, field=field)
            elif isinstance(form, TaggedJson):
                for index, tag in enumerate(form.tags):
                    # Compiled together, the parts would not tell which of them is wrong.
                    self._check_tag(tag.schema, field=tag.field or f"{field}[{index}]")
                if isinstance(form.answer, JsonSchema):
                    self._check_tag(form.answer.schema, field=_FIELDS[JsonSchema])
            matcher = self._matcher(form)
            if matcher.is_error():
                raise self._mistake(form, matcher.get_error())
            _check_first_step(matcher, end_token_ids=vocabulary.eos_tokens, field=field)
        return CompiledGrammar(matcher, executor, vocabulary.vocab_size, unenforced(form))

    def _check_tag(self, schema: str, *, field: str) -> None:
        with _refusing(field):
            parsed = _read_schema(schema, field=field)
            if message := self._matcher(JsonSchema(schema)).get_error():
                raise _schema_mistake(parsed, message, complain=self._complaint)

    def _matcher(self, form: ResponseFormat) -> LLMatcher:
        source = grammar_source(form, pieces=self._pieces)
        return LLMatcher(self.prepare()[0], source, log_level=0, limits=_LIMITS)

    def _mistake(self, form: ResponseFormat, message: str) -> FormMistake:
        if isinstance(form, JsonSchema):
            return _schema_mistake(json.loads(form.schema), message, complain=self._complaint)
        return _regex_mistake(message) if isinstance(form, Regex) else _lark_mistake(message)

    def _complaint(self, schema: Any) -> str:
        """Return what is wrong with a schema, "" if nothing is."""
        try:
            return self._matcher(JsonSchema(json.dumps(schema))).get_error()
        except (ValueError, RecursionError) as error:
            return str(error)

    def _pieces(self, text: str) -> list[int | str]:
        """Split a text into the special tokens it spells and the text between them."""
        vocabulary, _ = self.prepare()
        pieces: list[int | str] = []
        tokens = vocabulary.tokenize_str(text, parse_special=True)
        for is_special, group in itertools.groupby(tokens, vocabulary.is_special_token):
            run = list(group)
            pieces += run if is_special else [vocabulary.decode_str(run)]
        return pieces

    def prepare(self) -> tuple[LLTokenizer, LLExecutor]:
        """Return the vocabulary, which is read once, and the executor that computes masks over it.

        Reading 262,144 tokens takes two seconds and 50 MB and holds the GIL (llguidance 1.9.1, one x86 core),
        so it is best called while the model loads.
        """
        with self._vocabulary_lock:
            if self._vocabulary is None:
                setup = self._setup()
                ends = [i for i in setup.eos_token_ids if i < setup.vocabulary_size]
                vocabulary = LLTokenizer(setup.text, n_vocab=setup.vocabulary_size, eos_token=ends or None)
                self._vocabulary = (vocabulary, LLExecutor())
            return self._vocabulary

    def _setup(self) -> ProbeSetup:
        text = self._tokenizer.vocabulary_json()
        if text is None:
            raise InvalidRequest(
                Reason.UNSUPPORTED,
                "this model's tokenizer has no tokenizer.json, so its outputs cannot be constrained; "
                "leave response_format out",
                field="response_format",
            )
        size = max(self._vocabulary_size, self._tokenizer.vocabulary_size)
        return ProbeSetup(text, size, self._tokenizer.eos_token_ids)


def _read_schema(schema: str, *, field: str) -> Any:
    """Return a schema that is JSON and whose divisors are not too large."""
    try:
        parsed: Any = json.loads(schema)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise FormMistake(f"it is not JSON: {error.msg}", position) from error
    except ValueError as error:
        # A number with more digits than Python reads.
        raise FormMistake("a number in it has too many digits") from error
    if not isinstance(parsed, dict | bool):
        raise FormMistake("a JSON schema must be an object, true or false", "/")
    _check_multiples(schema, field=field)
    return parsed


def _check_first_step(matcher: LLMatcher, *, end_token_ids: list[int], field: str) -> None:
    """Compute the first mask, which also warms the lexer; refuse a grammar that no text can begin."""
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed[end_token_ids] = 0
    if not matcher.is_error() and allowed.any():
        return
    if not matcher.is_error():
        raise FormMistake("it allows nothing but the empty text")
    if "NoExtension" in matcher.get_error():
        raise FormMistake("no text can match it")
    detail = matcher.get_error().partition("\n")[0]
    raise InvalidRequest(
        Reason.GRAMMAR_TOO_COMPLEX,
        f"{field} is too complex: {detail}; simplify it",
        field=field,
        metadata={"detail": detail},
    )


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Turn a mistake in a form into a refusal of the request's field."""
    try:
        yield
        return
    except RecursionError:
        mistake = FormMistake("it is nested too deeply")
    except FormMistake as error:
        mistake = error
    except ValueError as error:
        # Python accepts some JSON that llguidance does not, such as half of a surrogate pair.
        mistake = FormMistake(str(error))
    where = f" (at {mistake.position})" if mistake.position else ""
    is_tool = field.startswith(_FIELDS[TaggedJson])
    raise InvalidRequest(
        Reason.TOOL_INVALID if is_tool else Reason.RESPONSE_FORMAT_INVALID,
        f"{field} cannot be used: {mistake.detail}{where}",
        field=field,
        metadata={"detail": mistake.detail, "place": mistake.position},
    )


def _check_multiples(text: str, *, field: str) -> None:
    """Refuse a schema, or a Lark grammar with `%json` parts, whose divisors add up to too much."""
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    total = sum(_states(match[1]) for match in _MULTIPLE_IN_TEXT.finditer(plain))
    if total > MULTIPLE_SUM_LIMIT:
        raise InvalidRequest(
            Reason.GRAMMAR_TOO_COMPLEX,
            f"the numbers of multipleOf in {field} add up to {total:.6g}, without their decimal points; the "
            f"limit is {MULTIPLE_SUM_LIMIT}; leave multipleOf out and check the answer",
            field=field,
            metadata={"multiple_sum": f"{total:.6g}", "multiple_sum_limit": MULTIPLE_SUM_LIMIT},
        )


def _states(number: str) -> float:
    """Return a number without its decimal point; 0 for anything that is not a number."""
    try:
        value = decimal.Decimal(number).copy_abs()  # `abs` would round, and raise if that overflows
    except decimal.InvalidOperation:
        return 0.0
    if not value.is_finite():
        return 0.0
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int), "a finite number"
    whole = decimal.Decimal((0, digits, 0)) if exponent < 0 else value
    return float(whole)


def _lark_mistake(message: str) -> FormMistake:
    """Read llguidance's message about a Lark grammar."""
    position = _LARK_POSITION.match(message)
    if position is None:
        return FormMistake(_one_line(message))
    # After the message it shows the source, which the caller has.
    detail = message[position.end() :].partition("\n")[0]
    regex_error = _REGEX_ERROR.search(message)
    if regex_error is not None:
        detail = f"{detail.partition(':')[0]}: {regex_error[1]}"
    return FormMistake(_one_line(detail), f"line {position[1]}, column {position[2]}")


def _regex_mistake(message: str) -> FormMistake:
    """Read llguidance's message about a lone regular expression."""
    error = _REGEX_ERROR.search(message)
    if error is None:
        return FormMistake(_one_line(_LARK_POSITION.sub("", message).partition("\n")[0]), "")
    caret = _REGEX_CARET.search(message)
    position = f"column {len(caret[1]) - _REGEX_INDENT + 1}" if caret is not None else ""
    return FormMistake(error[1], position)


def _schema_mistake(schema: Any, message: str, *, complain: Callable[[Any], str]) -> FormMistake:
    """Return the mistake with the smallest part for which `complain` reports the same as for the whole.

    Parts are compiled without their references. If no part has the mistake by itself, the whole has it.
    """
    message = _without_definition(message)
    byte_count = 0

    def has_it(part: Any) -> bool:
        nonlocal byte_count
        if byte_count > _PROBE_BYTES:
            return False
        try:
            stripped = _without_references(part)
            byte_count += len(json.dumps(stripped))
        except RecursionError:
            return False  # nested deeper than Python's stack
        return _without_definition(complain(stripped)) == message

    pointer, candidates = "", iter(_wholes(schema).items())
    while (faulty := next((each for each in candidates if has_it(each[1])), None)) is not None:
        pointer, part = faulty
        candidates = iter([(pointer + step, child) for step, child in _children(part)])
    return FormMistake(_one_line(message), pointer or "/")


def _without_definition(message: str) -> str:
    """Return a message without the name of the definition being processed: the server invented that name."""
    return message.partition(_DEFINITION)[0]


def _wholes(schema: Any) -> dict[str, Any]:
    """Return a schema and everything that its references point to, by JSON pointer."""
    references = References(schema)
    wholes = {"": schema}
    for pointer, part in parts_of(schema) if isinstance(schema, Mapping) else ():
        with contextlib.suppress(UnusableSchema):
            if "$ref" in part:
                wholes.update([references.target(part["$ref"], pointer)])
    return wholes


def _without_references(schema: Any) -> Any:
    """Return a schema without its references, as if they allowed everything."""
    if isinstance(schema, list):
        return [_without_references(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _without_references(value) for key, value in schema.items() if key not in _SHARED}


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from ((f"/{key}/{escaped(name)}", child) for name, child in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{index}", child) for index, child in enumerate(schema[key]))
    for key in _SINGLES:
        if isinstance(schema.get(key), Mapping | bool):
            yield f"/{key}", schema[key]


def _one_line(message: str) -> str:
    return clipped(" ".join(message.replace("<non-verbose/>", "").split()), _DETAIL_LENGTH_LIMIT)
