"""Histories from anywhere under templates of every manner: nothing that was said is lost on the way.

ICEHOUSE_CHAT_TEMPLATES may name a JSON file of real templates, name to text: they are tried too.
"""

from __future__ import annotations

import functools

import pytest
from icehouse_server.domain.chat import Conversation
from icehouse_server.errors import InvalidRequest

from tests.fixtures.chat.families import render
from tests.fixtures.chat.histories import (
    HISTORIES,
    REAL_TEMPLATES_FILE,
    TEMPLATES,
    real_templates,
    words_of,
)
from tests.fixtures.models.chat_templates import Family


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
