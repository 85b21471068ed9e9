"""Histories from anywhere under templates of every manner: nothing that was said is lost on the way.

CHAT_TEMPLATES may name a JSON file of real templates, name to text: they are tried too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from icehouse_server.domain.chat import ChatMessage, Conversation
from icehouse_server.errors import InvalidRequest
from icehouse_server.text.chat.history import fit
from icehouse_server.text.chat.traits import CallIds, TemplateTraits

from tests.fixtures.chat.families import render
from tests.fixtures.chat.histories import (
    HISTORIES,
    REAL_TEMPLATES_FILE,
    TEMPLATES,
    assistant,
    call,
    called,
    real_templates,
    result,
    system,
    user,
    words_of,
)
from tests.fixtures.models.chat_templates import Family

REFUSED = ("fireworks-ai/firefunction-v1",)
"""Real templates that refuse any history: a turn of the role "functions" has to come first."""

NINE = TemplateTraits(call_ids=CallIds.NINE_LETTERS)
NAMED = TemplateTraits(call_ids=CallIds.NAMED)


@functools.cache
def family(template: str) -> Family:
    return Family(template)


def problem(template: str, name: str) -> str:
    """Return what went wrong with a history under a template; empty where all its words are in the prompt."""
    messages = HISTORIES[name]
    try:
        text = render(family(template), Conversation(messages))
    except InvalidRequest as error:
        return error.message
    lost = [word for word in words_of(messages) if word not in text]
    return f"lost {lost}" if lost else ""


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_history_fits_every_manner_of_template(template: str) -> None:
    problems = {name: problem(TEMPLATES[template], name) for name in HISTORIES}
    assert {name: what for name, what in problems.items() if what} == {}


@pytest.mark.skipif(not REAL_TEMPLATES_FILE, reason="CHAT_TEMPLATES names no file of templates")
def test_every_history_fits_real_templates() -> None:
    templates = real_templates()
    problems = {
        (template, name): problem(text, name)
        for template, text in templates.items()
        for name in HISTORIES
        if template not in REFUSED
    }
    fitting = sum(not what for what in problems.values())
    print(f"{fitting} of {len(templates) * len(HISTORIES)} fit")
    assert {place: what for place, what in problems.items() if what} == {}


LONG_LOOP = (
    *(system("order one"), user("question one")),
    *(called(call("i1", "Oslo-1"), call("i2", "Rome-2"), text="let me see"), result("i1", "dry one")),
    *(
        result("i2", "wet two"),
        called(call("i3", "Lima-3")),
        result("i3", "noon three"),
        assistant("answer one"),
    ),
    *(user("question two"), called(call("i1", "Bonn-4")), result("i1", "four"), assistant("answer two")),
    user("question three"),
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_the_beginning_of_the_next(template: str) -> None:
    """What is done to a turn does not change when others follow: else each round is computed anew."""
    asked = [LONG_LOOP[:count] for count in (2, 5, 7, 9, 11, 13)]
    prompts = [
        render(family(TEMPLATES[template]), Conversation(messages, adds_generation_prompt=False))
        for messages in asked
    ]
    for before, after in itertools.pairwise(prompts):
        assert after.startswith(before)


def ids(messages: tuple[ChatMessage, ...], traits: TemplateTraits) -> list[str]:
    """Return the ids of calls and results as they stand in the prompt."""
    turns = fit(messages, traits)
    return [id for turn in turns for id in (*(c.id for c in turn.tool_calls), turn.tool_call_id) if id]


def test_ids_that_a_template_does_not_take_are_mapped_alike_for_call_and_result() -> None:
    made, answered = ids(HISTORIES["a loop"], NINE)
    assert made == answered and len(made) == 9 and made.isalnum() and made.isascii()
    assert ids(HISTORIES["a loop"], NINE) == [made, answered]
    assert ids(HISTORIES["ids of nine letters"], NINE) == ["abc123XYZ"] * 2
    assert ids(HISTORIES["huge ids"], TemplateTraits()) == ["ž" * 5000] * 2


def test_ids_that_hold_the_name_count_the_calls_as_the_model_does() -> None:
    named = ids(HISTORIES["three loops"], NAMED)
    assert named[::2] == ["functions.get_weather:0", "functions.get_weather:1", "functions.get_time:2"]
    assert named[::2] == named[1::2]
    kept = (called(call("functions.get_weather:7", "Oslo")), result("functions.get_weather:7", "dry"))
    assert ids(kept, NAMED) == ["functions.get_weather:7"] * 2


@pytest.mark.parametrize("traits", [TemplateTraits(), NINE, NAMED], ids=["any", "nine", "named"])
def test_no_two_calls_have_one_id(traits: TemplateTraits) -> None:
    for name in ("ids that repeat", "no ids"):
        turns = fit(HISTORIES[name], traits)
        made = [made.id for turn in turns for made in turn.tool_calls]
        answered = [turn.tool_call_id for turn in turns if turn.role == "tool"]
        assert made == answered and len(set(made)) == 2 and all(made)


def test_results_come_in_the_order_of_the_calls_and_with_their_names() -> None:
    for name in ("calls at once", "calls at once, swapped"):
        results = [turn for turn in fit(HISTORIES[name], TemplateTraits()) if turn.role == "tool"]
        assert [turn.content for turn in results] == ["dry one", "wet two"]
        assert {turn.name for turn in results} == {"get_weather"}


def test_results_without_ids_go_by_their_names_first() -> None:
    calls = called(call("a", "Oslo"), call("b", "Lima", name="get_time"))
    turns = fit((calls, result("", "noon", name="get_time"), result("", "dry")), TemplateTraits())
    assert [(turn.tool_call_id, turn.content) for turn in turns[1:]] == [("a", "dry"), ("b", "noon")]


def test_a_result_of_an_earlier_call_is_not_taken_for_one_of_the_last() -> None:
    messages = (
        called(call("a", "Oslo")),
        result("a", "dry"),
        called(call("b", "Rome")),
        result("a", "again"),
    )
    assert fit(messages, TemplateTraits())[-1].tool_call_id == "a"
    folded = fit(messages, TemplateTraits(takes_stray_results=False))
    assert folded[-1] == user("<tool_response>\nagain\n</tool_response>")


def test_calls_at_once_are_made_one_after_the_other_where_a_template_takes_but_one() -> None:
    turns = fit(HISTORIES["calls at once, swapped"], TemplateTraits(takes_parallel_calls=False))
    assert [turn.role for turn in turns] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert all(turns[i].tool_calls[0].id == turns[i + 1].tool_call_id for i in (1, 3))


def test_calls_and_results_become_text_where_a_template_has_no_words_for_them() -> None:
    traits = TemplateTraits(shows_tool_calls=False, shows_tool_results=False)
    _, made, answered = fit(HISTORIES["calls at once"], traits)
    assert made.content == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo-1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome-2"}}\n</tool_call>'
    )
    assert answered == user(
        "<tool_response>\ndry one\n</tool_response>\n<tool_response>\nwet two\n</tool_response>"
    )


def test_who_speaks_is_said_where_two_become_one() -> None:
    turns = fit(HISTORIES["users of several names"], TemplateTraits(takes_repeated_roles=False))
    assert turns == [user("Ann: question one\n\nBob: question two")]
    same = (user("one", name="Ann"), user("two", name="Ann"))
    assert fit(same, TemplateTraits(takes_repeated_roles=False)) == [user("one\n\ntwo", name="Ann")]


def test_a_template_that_takes_all_gets_all_as_it_is() -> None:
    messages = HISTORIES["words and thoughts beside calls"]
    named = (*messages[:-1], dataclasses.replace(messages[-1], name="get_weather"))
    assert fit(messages, TemplateTraits()) == list(named)
