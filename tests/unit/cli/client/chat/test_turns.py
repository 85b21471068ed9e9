"""Turns of a user: lines, several lines between triple quotes, commands."""

from __future__ import annotations

import io

import pytest
from icehouse_server.cli.client.chat.turns import HELP, Command, TurnReader, Verb, command_of


def turns(text: str) -> list[object]:
    return list(TurnReader(io.StringIO(text), is_terminal=False))


def test_each_line_is_a_turn_and_empty_ones_are_none() -> None:
    assert turns("one\n\n  \n two \nthree") == ["one", " two ", "three"]


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ('"""\none\n\n/two\n"""\n', "one\n\n/two"),
        ('"""one\ntwo"""\n', "one\ntwo"),
        ('"""/etc is a folder"""\n', "/etc is a folder"),
        ('"""\nthe input ends', "the input ends"),
    ],
)
def test_triple_quotes_hold_a_turn_of_several_lines(text: str, turn: str) -> None:
    assert turns(text) == [turn]


def test_what_follows_the_quotes_is_another_turn() -> None:
    assert turns('"""\none\n"""\ntwo\n') == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/save  a b.json ", Command(Verb.SAVE, "a b.json", "save")),
        ("/EXIT", Command(Verb.EXIT, "", "EXIT")),
        ("/bye", Command(Verb.EXIT, "", "bye")),
        ("/?", Command(Verb.HELP, "", "?")),
        ("/etc/passwd what is it", Command(None, "what is it", "etc/passwd")),
    ],
)
def test_a_slash_begins_a_command(line: str, command: Command) -> None:
    assert command_of(line) == command


def test_every_command_is_explained() -> None:
    assert set(HELP) == set(Verb)
