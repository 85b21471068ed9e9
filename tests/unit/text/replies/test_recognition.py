"""A model's family is recognized by what its template renders, and reported with the evidence."""

from __future__ import annotations

import pytest
from icehouse_server.text.replies.families import FAMILIES
from icehouse_server.text.replies.recognition import KNOWN_THOUGHTS, Vocabulary, find_reply_format

from tests.fixtures.chat.family_templates import CALLS, chat_template, template_of
from tests.fixtures.chat.notations import WRITERS

NO_TOKENS = Vocabulary((), (), ())
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
OFFERING = "{% if tools %}OFFER{% endif %}" + PLAIN


def vocabulary(*tokens: str, special: tuple[str, ...] = (), parser: str = "") -> Vocabulary:
    return Vocabulary(tokens, tokens, special, parser)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_the_calls_that_its_template_writes(family) -> None:
    thoughts = WRITERS[family.name].thoughts
    found = find_reply_format(chat_template(template_of(family.name, thoughts=thoughts)), NO_TOKENS)
    assert found.family == family, found.evidence
    is_written = family.name != "smollm3"  # whose template writes no calls
    assert ("the chat template writes calls so" in found.evidence[0]) is is_written
    if family.layout is None and is_written:
        assert (found.think_start, found.think_end) == thoughts
    assert found.marks_calls and not found.hides(reads_calls=True)


@pytest.mark.parametrize(
    "thoughts", [*KNOWN_THOUGHTS, ("<qz:ponder>", "</qz:ponder>"), ("[MUSE]", "[/MUSE]")]
)
def test_reasoning_is_what_a_rendered_thought_stands_between(thoughts: tuple[str, str]) -> None:
    found = find_reply_format(chat_template(template_of("hermes", thoughts=thoughts)), NO_TOKENS)
    assert (found.think_start, found.think_end) == thoughts and found.family.name == "hermes"


def test_a_notation_that_is_only_near_counts_where_no_other_fits() -> None:
    as_text = template_of("command-a").replace(
        "{{ f.arguments | tojson }}", "{{ f.arguments | tojson | tojson }}"
    )
    found = find_reply_format(chat_template(as_text), NO_TOKENS)
    assert found.family.name == "command-a"


def test_words_of_the_templates_source_tell_nothing() -> None:
    misleading = "{# <tool_call> <function= <arg_key> [TOOL_CALLS] <think> #}" + PLAIN
    found = find_reply_format(chat_template(misleading), NO_TOKENS)
    assert (found.family.name, found.think_start, found.evidence) == ("", "", ())
    both = "{# <tool_call>\\n<function= <minimax:tool_call> #}" + template_of("hermes")
    assert find_reply_format(chat_template(both), NO_TOKENS).family.name == "hermes"


def test_what_the_prompt_says_of_calls_counts_where_none_are_written() -> None:
    asked = 'Return <tool_call>{"name": ..., "arguments": ...}</tool_call>'
    found = find_reply_format(chat_template(OFFERING.replace("OFFER", asked)), NO_TOKENS)
    assert found.family.name == "hermes" and "the prompt that offers tools" in found.evidence[0]


def test_the_vocabulary_counts_where_the_template_says_nothing() -> None:
    tokens = ("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")
    found = find_reply_format(chat_template(PLAIN), vocabulary(*tokens))
    assert (found.family.name, found.think_start) == ("kimi", "<think>")
    assert all("the vocabulary has" in line for line in found.evidence)


def test_the_tokenizers_configuration_is_asked_last() -> None:
    found = find_reply_format(chat_template(PLAIN), vocabulary(parser="qwen3_coder"))
    assert found.family.name == "qwen-tags" and "configuration" in found.evidence[0]
    found = find_reply_format(chat_template(template_of("glm")), vocabulary(parser="qwen3_coder"))
    assert found.family.name == "glm"


def test_a_prompt_that_begins_the_reasoning_tells_its_markers() -> None:
    begun = PLAIN + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    found = find_reply_format(chat_template(begun), NO_TOKENS)
    assert (found.think_start, found.think_end) == ("<think>", "</think>")
    assert "begins a reply so" in found.evidence[0]


def test_markers_that_decoding_hides_are_known() -> None:
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    hidden = vocabulary(*tokens, special=tokens[:2])
    found = find_reply_format(chat_template(template_of("mistral")), hidden)
    assert found.hides(reads_calls=True) and not found.hides(reads_calls=False)
    harmony = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")
    found = find_reply_format(chat_template(template_of("harmony")), vocabulary(*harmony, special=harmony))
    assert found.hides(reads_calls=False) and found.is_always_read and found.marks_reasoning


def test_markers_that_nobody_reads_are_reported() -> None:
    found = find_reply_format(
        chat_template(PLAIN), vocabulary("<|qz_tool_call|>", "<|im_start|>", "<qzthink>")
    )
    assert found.unread_markers == ("<qzthink>", "<|qz_tool_call|>")
    found = find_reply_format(
        chat_template(template_of("hermes", thoughts=("<think>", "</think>"))),
        vocabulary("<tool_call>", "<tool_response>", "<think>", "</think>"),
    )
    assert found.unread_markers == ()


def test_without_a_template_nothing_is_rendered() -> None:
    found = find_reply_format(None, NO_TOKENS)
    assert not found.marks_calls and not found.marks_reasoning


def test_every_notation_has_a_template() -> None:
    own = {"smollm3", "harmony", "muse", "functionary", "functionary-2"}
    assert set(CALLS) | own == {family.name for family in FAMILIES}
