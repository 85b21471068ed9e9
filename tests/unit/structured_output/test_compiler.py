"""From a form to a grammar: what it takes, what it refuses and where it says the mistake is."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from icehouse_server.domain.response_format import (
    Choice,
    Constraint,
    JsonObject,
    JsonSchema,
    JsonTag,
    LarkGrammar,
    Regex,
    ResponseFormat,
    TaggedJson,
)
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.structured_output.compiler import STACK_BYTES_PER_BYTE, GrammarCompiler
from icehouse_server.structured_output.matcher import fill_masks
from icehouse_server.text.tokenizer import Tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from tests.fixtures.models.vocabulary import (
    EOS_ID,
    PAD_ID,
    TURN_END_ID,
    VOCABULARY_SIZE,
    byte_fallback_tokenizer,
    tokenizer,
)
from tests.fixtures.patience import BOUND_S

BUILT = tokenizer()


class Vocabulary:
    """A tokenizer's vocabulary; None stands for a tokenizer that cannot tell it."""

    def __init__(self, built: Any = BUILT, *, eos: int = EOS_ID) -> None:
        self._built = built
        self.eos_token_ids = (eos,)
        self.vocabulary_size = built.get_vocab_size() if built is not None else 0

    def vocabulary_json(self) -> str | None:
        return self._built.to_str() if self._built is not None else None


def compiler(**settings: Any) -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(), **{"vocabulary_size": VOCABULARY_SIZE, "cache_limit": 4} | settings)


COMPILER = compiler()


def encode(text: str) -> list[int]:
    return BUILT.encode(text, add_special_tokens=False).ids


def allowed(constraint: Constraint) -> set[int]:
    bits = np.unpackbits(constraint.allowed_tokens().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def takes(form: ResponseFormat, text: str, *, by: GrammarCompiler = COMPILER) -> bool:
    """Feed a text token by token, as a model would draw it, and its end."""
    constraint = by.compile(form).start()
    for token_id in encode(text):
        if constraint.is_finished or token_id not in allowed(constraint):
            return False
        constraint.accept(token_id)
    assert constraint.error is None
    return constraint.is_finished or EOS_ID in allowed(constraint)


PERSON = JsonSchema(
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    )
)
CALL = JsonTag(
    "<call>", '{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"]}', "</call>"
)
TURN = JsonTag("<|im_start|>run ", '{"type":"integer"}', "<pad>")

TAKEN = [
    (PERSON, ['{"name":"Ada","age":36}', '{ "name" : "é🧊" ,\n "age": 0}'], ['{"age":1}', '{"name":"A"}']),
    (JsonSchema("true"), ["null", "[1, {}]", '"x"'], ["nul", "{"]),
    (JsonSchema('{"type":"integer"}', is_compact=True), ["12"], [" 12", "x"]),
    (JsonObject(), ["{}", '{"a": [1, null]}'], ["[]", "1"]),
    (JsonObject(is_compact=True), ['{"a":1}'], ['{"a": 1}']),
    (Regex(r"[ab]+/\d{2}"), ["ab/12"], ["c", "ab/1"]),
    (LarkGrammar('start: "a" start "b" | "ab"'), ["ab", "aabb"], ["aab", "b"]),
    (Choice(("yes", "no", "no way", 'q"\\\n', "🧊")), ["yes", "no", "no way", 'q"\\\n', "🧊"], ["ye", "now"]),
    (TaggedJson((CALL,)), ['<call>{"x":1}</call>'], ['<call>{"x":1}</call><call>{"x":1}</call>', "<call>"]),
    (TaggedJson((CALL,)), ['<call>{"x": 1}</call>'], ['<call>{"x": 1, "description": "made up"}</call>']),
    (TaggedJson((CALL, TURN), may_repeat=True), ['<call>{"x":1}</call>\n<|im_start|>run 7<pad>'], ["hi"]),
    (
        TaggedJson((CALL,), may_repeat=True, trigger="<call>", markers=("<pad>",)),
        ["", "so <call", "a<pad>b", 'so<pad>\n<call>{"x":1}</call> and <call>{"x":2}</call>.'],
        ["<call>", '<call>{"x":"1"}</call>', "a <call>b", 'a<call>{"x":1}</call> <call>no', "<|im_start|>"],
    ),
    (
        TaggedJson((CALL,), trigger="<call>"),
        ["no <call", 'so <call>{"x":1}</call>\n'],
        ['<call>{"x":1}</call><call>{"x":1}</call>', '<call>{"x":1}</call> so', "a<pad>b"],
    ),
    (
        TaggedJson((TURN,), may_repeat=True, trigger="<|im_start|>"),
        ["run 7", "so <|im_start|>run 7<pad> and\n<|im_start|>run 8<pad>"],
        ["so <|im_start|>go", "<|im_start|>run x<pad>"],
    ),
    (
        TaggedJson((CALL, TURN), may_repeat=True, answer=JsonSchema('{"enum":[{"a":1},[]]}')),
        ['{"a":1}', "[]", '<call>{"x":1}</call>', '<|im_start|>run 7<pad>\n<call>{"x":1}</call>'],
        [
            "",
            "hi",
            '{"b":1}',
            '{"a":1}<call>{"x":1}</call>',
            '<call>{"x":1}</call>[]',
            '<call>{"x":"1"}</call>',
        ],
    ),
    (TaggedJson((CALL,), answer=JsonObject()), ['{"a":1}', '<call>{"x":1}</call>'], ["[]", "so"]),
    (
        TaggedJson((CALL,), may_repeat=True, opening="<ca"),
        ['ll>{"x":1}</call>', 'll>{"x":1}</call>\n<call>{"x":2}</call>'],
        ['<call>{"x":1}</call>', 'll>{"x":1}</call>ll>{"x":2}</call>'],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), TAKEN, ids=lambda value: type(value).__name__)
def test_a_form_takes_what_it_says_and_nothing_else(
    form: ResponseFormat, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


def test_special_tokens_of_a_tag_are_tokens_not_text() -> None:
    constraint = COMPILER.compile(TaggedJson((TURN,))).start()
    assert allowed(constraint) == {*encode("<|im_start|>")} and len(encode("<|im_start|>")) == 1


def test_the_end_is_allowed_where_the_form_is_complete_and_forced_where_nothing_may_follow() -> None:
    constraint = COMPILER.compile(Choice(("no", "no way"))).start()
    for token_id in encode("no"):
        assert EOS_ID not in allowed(constraint)
        constraint.accept(token_id)
    assert EOS_ID in allowed(constraint) and not constraint.is_finished
    for token_id in encode(" way"):
        constraint.accept(token_id)
    assert constraint.is_finished and constraint.error is None
    constraint.accept(EOS_ID)
    assert constraint.is_finished and constraint.error is None


@pytest.mark.parametrize("name", ["eos ends", "turn end ends"])
def test_every_end_token_of_the_model_ends(name: str) -> None:
    eos = {"eos ends": EOS_ID, "turn end ends": TURN_END_ID}[name]
    built = GrammarCompiler(Vocabulary(eos=eos), vocabulary_size=VOCABULARY_SIZE, cache_limit=1)
    constraint = built.compile(Regex("a*")).start()
    assert eos in allowed(constraint) and PAD_ID not in allowed(constraint)
    constraint.accept(eos)
    assert constraint.is_finished and constraint.error is None


@pytest.mark.parametrize(("form", "texts", "_"), TAKEN, ids=lambda value: type(value).__name__)
def test_a_token_is_allowed_by_itself_where_the_mask_has_it(
    form: ResponseFormat, texts: list[str], _: list[str]
) -> None:
    """Where one text alone can follow, the mask is one spelling of it, and others are taken as well."""
    grammar = compiler(vocabulary_size=VOCABULARY_SIZE + 100).compile(form)

    def after(token_ids: list[int]) -> Constraint:
        constraint = grammar.start()
        for token_id in token_ids:
            constraint.accept(token_id)
        return constraint

    for ids in map(encode, texts):
        for place in range(len(ids)):
            constraint = after(ids[:place])
            each = {i for i in range(VOCABULARY_SIZE + 100) if constraint.allows(i)}
            mask = allowed(constraint)
            assert mask == each or (mask < each and len(mask) == 1), (place, mask ^ each)
            assert [after([*ids[:place], other]).error for other in each - mask] == [None] * len(each - mask)


def test_entries_of_the_models_table_without_a_token_are_never_allowed() -> None:
    wide = compiler(vocabulary_size=VOCABULARY_SIZE + 100)
    constraint = wide.compile(Regex("(.|\n)*")).start()
    assert len(constraint.allowed_tokens()) * 32 >= VOCABULARY_SIZE + 100
    assert max(allowed(constraint)) < VOCABULARY_SIZE


def test_a_sentencepiece_vocabulary_spells_bytes() -> None:
    built = byte_fallback_tokenizer()
    by = GrammarCompiler(Vocabulary(built, eos=2), vocabulary_size=built.get_vocab_size(), cache_limit=1)
    constraint = by.compile(Choice(("the 🧊",))).start()
    drawn: list[int] = []
    while not constraint.is_finished:
        drawn.append(min(allowed(constraint)))
        constraint.accept(drawn[-1])
    assert built.decode(drawn) == "the 🧊"


CHAIN = JsonSchema(
    json.dumps(
        {
            "properties": {f"p{i}": {"$ref": "#/$defs/d0"} for i in range(300)},
            "$defs": {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(299)}
            | {"d299": {"items": {"pattern": "("}}},
        }
    )
)
"""A mistake that is far from the beginning."""
NAMES = JsonSchema('{"propertyNames":{"$ref":"#/$defs/n"},"$defs":{"n":{"anyOf":[{"$ref":"#/$defs/n"}]}}}')
MISTAKES = [
    (JsonSchema('{"type":'), "line 1, column 9", "not JSON"),
    (JsonSchema("[1]"), "/", "an object, true or false"),
    (JsonSchema("[" * 5000), "", "nested too deeply"),
    (JsonSchema('{"type":"strin"}'), "/", "strin"),
    (JsonSchema('{"properties":{"a/b":{"items":{"type":"strin"}}}}'), "/properties/a~1b/items", "strin"),
    (JsonSchema('{"anyOf":[{"type":"null"},{"contains":{"type":"null"}}]}'), "/anyOf/1/contains", "contains"),
    (
        JsonSchema('{"$ref":"#/$defs/t","$defs":{"t":{"items":{"$ref":"#/$defs/u"}},"u":{"pattern":"("}}}'),
        "/$defs/u",
        "unclosed group",
    ),
    (JsonSchema('{"properties":{"a":{"$ref":"#/$defs/none"}}}'), "/properties/a/$ref", "none"),
    (
        JsonSchema('{"properties":{"a b":{"$ref":"#/$defs/c%20d"}},"$defs":{"c d":{"type":"x"}}}'),
        "/$defs/c d",
        "x",
    ),
    (JsonSchema('{"$ref":"https://x.example/y"}'), "/$ref", "x.example"),
    (JsonSchema('{"x-guidance":{"lenient":true},"not":{"type":"null"}}'), "/not", "cannot be enforced"),
    (JsonSchema('{"not":{}}'), "/", "Unsatisfiable"),
    (JsonSchema('{"const":1e999}'), "", "Out of range"),
    (JsonSchema('{"const":"\\ud800"}'), "/", "hex escape"),
    (JsonSchema('{"items":' * 200 + "true" + "}" * 200), "/items" * 129, "nested more than 128 deep"),
    (JsonSchema('{"oneOf":[{"type":"integer"},{"type":"number"}]}'), "/oneOf", "use anyOf"),
    (JsonSchema('{"type":"string","pattern":"("}'), "/", "unclosed group"),
    (JsonSchema("false"), "/", "Unsatisfiable"),
    (JsonSchema('{"enum":' + "[" * 900 + "]" * 900 + "}"), "/", "recursion limit"),
    (CHAIN, "/$defs/d299/items", "unclosed group"),
    (
        JsonSchema('{"allOf":[{"type":"null"},{"$ref":"#/$defs/n"}],"$defs":{"n":{"enum":[2]}}}'),
        "/",
        "Unsatisf",
    ),
    (NAMES, "/$defs/n", "nested schemas"),
    (Regex("a(b"), "column 2", "unclosed group"),
    (Regex("a(?=b)"), "column 2", "look-around"),
    (Regex("[^\\s\\S]"), "", "no text can match"),
    (Regex(""), "", "nothing but the empty text"),
    (Choice(("",)), "", "nothing but the empty text"),
    (LarkGrammar('start: "a" X'), "line 1, column 8", "unknown name"),
    (LarkGrammar('start: a\na: "b"\n b c'), "line 3, column 4", "Expected"),
    (LarkGrammar('start: "a" x\n\nx: /(/'), "line 3, column 4", "unclosed group"),
    (LarkGrammar("a: start"), "", "no start rule"),
    (LarkGrammar('start: %json {"type":"strin"}'), "line 1, column 8", "strin"),
    (TaggedJson((CALL, JsonTag("<x>", '{"items":{"type":"strin"}}'))), "/items", "strin"),
    (TaggedJson((CALL, JsonTag(' {"name": "f"', "{}")), answer=JsonObject()), "", "begin as JSON does"),
    (
        TaggedJson((CALL, JsonTag("<x>", '{"items":{"not":{"type":"null"}}}'))),
        "/items/not",
        "cannot be enforced",
    ),
]


@pytest.mark.parametrize(("form", "place", "detail"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_named_with_its_place(form: ResponseFormat, place: str, detail: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        COMPILER.compile(form)
    error = refused.value
    is_tool = isinstance(form, TaggedJson)
    assert error.reason is (Reason.TOOL_INVALID if is_tool else Reason.RESPONSE_FORMAT_INVALID)
    assert error.metadata["place"] == place, error.message
    assert detail in error.message and "\n" not in error.message and "verbose" not in error.message
    assert error.field and error.message.startswith(error.field)


def test_a_mistake_in_a_tag_names_the_tag() -> None:
    with pytest.raises(InvalidRequest) as refused:
        COMPILER.compile(TaggedJson((CALL, JsonTag("<x>", "{"))))
    assert refused.value.field == "prompt.tools[1]"
    with pytest.raises(InvalidRequest) as refused:
        COMPILER.compile(TaggedJson((JsonTag("<x>", "{", field="prompt.tools[7].parameters_json"),)))
    assert refused.value.field == "prompt.tools[7].parameters_json"
    with pytest.raises(InvalidRequest) as refused:
        COMPILER.compile(TaggedJson((CALL,), answer=JsonSchema("{")))
    assert refused.value.field == "response_format.json_schema"


COSTLY = [
    JsonSchema('{"multipleOf":1000003}'),
    JsonSchema(json.dumps({"properties": {f"p{i}": {"multipleOf": 5003 + i} for i in range(21)}})),
    JsonSchema('{"multipleOf":1e9}'),
    LarkGrammar('start: %json {"\\u006dultipleOf": 1000003}'),
    LarkGrammar('start: %json {"multipleOf": 1e9999999}'),
    LarkGrammar("start: T\nT: A & B & C\nA: /.*(a|b).{30}/\nB: /.*c.{29}/\nC: /(.*d.{23})+/"),
]


@pytest.mark.parametrize("form", COSTLY, ids=lambda form: str(form)[:60])
def test_what_would_cost_too_much_is_refused(form: ResponseFormat) -> None:
    with pytest.raises(InvalidRequest) as refused:
        COMPILER.compile(form)
    assert refused.value.reason is Reason.GRAMMAR_TOO_COMPLEX, refused.value.message
    assert "simplify" in refused.value.message or "leave" in refused.value.message


def test_small_divisors_are_taken() -> None:
    assert takes(JsonSchema('{"type":"number","multipleOf":0.01}'), "1.25")
    assert not takes(JsonSchema('{"type":"integer","multipleOf":7}'), "8")


def test_a_step_past_the_limits_ends_the_output_with_a_reason_not_with_an_end_token() -> None:
    constraint = COMPILER.compile(LarkGrammar('start: (("a"{1000}){1000}){1000}')).start()
    constraint.accept(encode("a")[0])
    assert constraint.error is not None and constraint.error.reason is Reason.GRAMMAR_TOO_COMPLEX
    assert "\n" not in constraint.error.message


def test_a_token_outside_the_grammar_is_an_error_and_no_end() -> None:
    constraint = COMPILER.compile(Choice(("yes",))).start()
    constraint.accept(encode("x")[0])
    assert constraint.error is not None


def test_outputs_of_one_grammar_know_nothing_of_each_other() -> None:
    grammar = COMPILER.compile(Choice(("ab", "cd")))
    first, second = grammar.start(), grammar.start()
    first.accept(encode("a")[0])
    assert allowed(first) == set(encode("b"))
    assert allowed(second) == allowed(grammar.start()) >= {encode("a")[0], encode("c")[0]}


def test_masks_filled_together_are_those_filled_alone() -> None:
    constraints: list[Constraint] = [COMPILER.compile(form).start() for form, _, _ in TAKEN]
    together = fill_masks(constraints)
    assert [mask.tolist() for mask in together] == [c.allowed_tokens().tolist() for c in constraints]
    assert len({tuple(mask.tolist()) for mask in together}) > 4, "the masks differ from each other"


def test_the_last_grammars_are_kept_and_the_oldest_let_go() -> None:
    by = compiler(cache_limit=2)
    first = by.compile(Regex("a"))
    by.compile(Regex("b"))
    assert by.compile(Regex("a")) is first
    by.compile(Regex("c"))
    assert by.compile(Regex("a")) is first, "used last, so kept"
    second = by.compile(Regex("b"))
    assert by.compile(Regex("b")) is second and by.compile(Regex("a")) is not None


def test_a_slow_tokenizer_says_that_it_cannot() -> None:
    slow = GrammarCompiler(Vocabulary(None), vocabulary_size=10, cache_limit=1)
    with pytest.raises(InvalidRequest) as refused:
        slow.compile(JsonObject())
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "response_format")


def test_the_vocabulary_goes_without_merges_and_reads_the_same() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=BUILT, eos_token="<eos>")
    text = Tokenizer(TokenizerWrapper(fast)).vocabulary_json()
    assert text is not None and json.loads(text)["model"]["merges"] == []
    assert json.loads(text)["model"]["vocab"] == json.loads(BUILT.to_str())["model"]["vocab"]


@pytest.mark.parametrize(
    "line", ["a{0}:((((a{1}))))", 'A{0}:"x" A{1}', "a{0}:a{1}"], ids=["parentheses", "tokens", "rules"]
)
def test_the_deepest_form_of_the_largest_size_fits_the_stack(line: str) -> None:
    """Too small a stack does not fail here: it ends the process."""
    size_bytes = 1 << 14
    count = size_bytes // (len(line) + 6)
    lines = [line.format(index, index + 1) for index in range(count)]
    last = line[0] + str(count)
    grammar = f"start: {line[0]}0\n" + "\n".join(lines) + f'\n{last}: "b"'
    failures: list[str] = []

    def work() -> None:
        try:
            takes(LarkGrammar(grammar), "b")
        except InvalidRequest as error:
            failures.append(error.message)

    old = threading.stack_size(STACK_BYTES_PER_BYTE * size_bytes)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(old)
    thread.join(BOUND_S)
    assert not thread.is_alive() and failures == []
