"""A template that goes on and on is stopped, and one that does not is not."""

from __future__ import annotations

import sys

import jinja2
import pytest
from icehouse_server.text.chat.probes import TemplateTooLong, step_limit

LOOP = jinja2.Environment(autoescape=True).from_string("{% for a in range(n) %}{{ a }}\n{% endfor %}")


def test_lines_of_a_template_are_counted() -> None:
    with step_limit(1000):
        assert LOOP.render(n=100).startswith("0\n1\n")
    with pytest.raises(TemplateTooLong, match="more than 1000 lines"), step_limit(1000):
        LOOP.render(n=100_000)


def test_lines_of_others_do_not_count() -> None:
    with step_limit(10):
        assert sum(number for number in range(1000)) == 499_500


def test_whoever_traced_before_traces_again() -> None:
    before = sys.gettrace()
    with pytest.raises(TemplateTooLong), step_limit(10):
        LOOP.render(n=1000)
    assert sys.gettrace() is before
