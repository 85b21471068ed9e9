"""Traits of templates are found by rendering, and a probe that fails is no trait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from icehouse_server.text.chat.history import fit
from icehouse_server.text.chat.probes import skeleton_of
from icehouse_server.text.chat.traits import Arguments, CallIds, EmptyContent, TemplateTraits, ToolForm

from tests.fixtures.chat.families import WEATHER, tokenizer_of
from tests.fixtures.chat.histories import HISTORIES, TEMPLATES, words_of
from tests.fixtures.models.chat_templates import THINKING, Family


def traits(template: str, *, has_tools: bool = False) -> TemplateTraits:
    return tokenizer_of(Family(template))._renderer.template.traits(has_tools=has_tools)


FOUND: dict[str, dict[str, Any]] = {
    "answered_calls": {"filler": "...", "takes_stray_results": False, "takes_user_after_result": False},
    "arguments_as_text": {"arguments": Arguments.VERBATIM, "shows_tools": False},
    "channels": {
        "takes_parallel_calls": False,
        "knows_developer": False,
        "reasoning_key": "reasoning_content",
    },
    "chatml": {"shows_tool_calls": False, "shows_tool_results": True},
    "counted_alternation": {"takes_repeated_roles": False, "takes_first_system": False},
    "described_tools": {"wants_tool_list": True, "tool_form": ToolForm.COMPLETE, "shows_tools": True},
    "ids_only": {"call_ids": CallIds.NAMED, "arguments": Arguments.VERBATIM},
    "lone_system_lost": {"takes_first_system": True, "takes_lone_system": False},
    "parts": {"part_roles": frozenset({"user", "assistant"})},
    "plan_beside_calls": {"reasoning_key": "tool_plan", "arguments": Arguments.OBJECT},
    "single_calls": {"takes_parallel_calls": False, "shows_tools": True, "tool_form": ToolForm.WRAPPED},
    "strict_alternation": {"call_ids": CallIds.NINE_LETTERS, "takes_first_system": False},
    "thinking_parts": {"reasoning_key": "", "arguments": Arguments.OBJECT},
    "thoughts_dropped": {
        "takes_first_assistant": False,
        "takes_later_system": False,
    },
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_special_of_each_manner_is_found(template: str) -> None:
    found = dataclasses.asdict(traits(TEMPLATES[template]))
    assert {name: found[name] for name in FOUND[template]} == FOUND[template]


def test_a_template_that_refuses_everything_shows_no_tools() -> None:
    assert not traits("{{ raise_exception('No.') }}").shows_tools


def test_a_developer_of_its_own_is_known() -> None:
    own = (
        "{% for m in messages %}{{ '<dev>' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}"
    )
    assert traits(own).knows_developer
    assert not traits(TEMPLATES["channels"]).knows_developer  # there it is the system's other name


def test_a_word_of_the_source_is_no_trait() -> None:
    comments = "{# developer, message.thinking, tool_calls #}"
    assert traits(comments + TEMPLATES["chatml"]) == traits(TEMPLATES["chatml"])


def test_the_key_of_thoughts_is_where_they_come_out() -> None:
    renamed = THINKING.template.replace("message.reasoning_content", "(message['thou' ~ 'ght'] or '')")
    assert traits(renamed).reasoning_key == "thought"


def test_a_silent_turn_has_the_form_that_the_template_reads() -> None:
    template = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% endif %}
    {%- if m.tool_calls %}{{ m.content[0].text }}{% for call in m.tool_calls %}
    {{- call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"""
    assert traits(template).empty_content is EmptyContent.PARTS


def test_tools_have_their_own_traits_where_they_change_the_template() -> None:
    template = "{% if tools %}{{ tools | tojson }}" + TEMPLATES["ids_only"] + "{% else %}"
    template += TEMPLATES["chatml"] + "{% endif %}"
    assert traits(template).call_ids is CallIds.ANY
    assert traits(template, has_tools=True).call_ids is CallIds.NAMED


def test_a_skeleton_has_a_word_for_each_text_and_none_for_silence() -> None:
    messages = HISTORIES["words beside calls"]
    skeleton = skeleton_of(messages)
    assert [message.role for message in skeleton.messages] == [message.role for message in messages]
    assert "messages[1].tool_calls[0].arguments_json" in skeleton.fields.values()
    assert len(skeleton.fields) == sum(bool(m.content) + 2 * len(m.tool_calls) for m in messages)
    assert not skeleton_of(HISTORIES["empty question"][:1]).fields


@pytest.mark.parametrize("name", ["assistant first, with a call", "assistant alone", "system alone"])
@pytest.mark.parametrize("template", ["single_calls", "strict_alternation"])
def test_tools_and_history_are_shown_where_nobody_has_asked(template: str, name: str) -> None:
    """These templates tell the tools in a user's turn, or in the first turn as if it were a user's."""
    found = tokenizer_of(Family(TEMPLATES[template]))._renderer.template
    turns = fit(HISTORIES[name], found.traits(has_tools=True))
    text = found.text(turns, tools=[WEATHER])
    assert all(word in text for word in (*words_of(HISTORIES[name]), WEATHER.name, WEATHER.description))
