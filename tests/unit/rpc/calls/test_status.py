"""The table of reasons is whole, is what the code raises, and is what the docs show."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict

import pytest
from icehouse_server import errors
from icehouse_server.errors import IcehouseError, Reason
from icehouse_server.rpc.calls.status import code_of

from docs.reasons import REASONS, markdown
from tests.tidy.tree import ROOT, SERVER, modules, nodes_of

LOCAL = (errors.ConfigError, errors.ModelError, errors.StartError)
"""Errors that end a command or a start. No call raises them."""


@functools.cache
def raised_classes() -> dict[Reason, set[str]]:
    """Return which error classes are made with each reason, from the syntax trees."""
    found: dict[Reason, set[str]] = defaultdict(set)
    for module in modules(SERVER):
        for node in nodes_of(module):
            if not isinstance(node, ast.Call):
                continue
            for argument in node.args:
                if (
                    isinstance(argument, ast.Attribute)
                    and isinstance(argument.value, ast.Name)
                    and argument.value.id == "Reason"
                ):
                    name = ast.unparse(node.func).rpartition(".")[2]
                    found[Reason[argument.attr]].add("IcehouseError" if name == "__init__" else name)
    return found


def test_every_reason_is_in_the_table_and_has_words() -> None:
    assert set(REASONS) == set(Reason), "give it a row in docs/reasons.py, then make gen"
    assert all(row.meaning.endswith(".") and row.advice.endswith(".") for row in REASONS.values())
    assert not any("|" in row.meaning + row.advice for row in REASONS.values())


def test_the_protos_have_what_calls_are_refused_for_in_the_same_words() -> None:
    text = (ROOT / "protos/icehouse/v1/error_reason.proto").read_text(encoding="utf-8")
    told = re.findall(r"((?:  // .+\n)+)  ERROR_REASON_(\w+) = \d+;", text)
    words = {name: " ".join(line.strip("/ ") for line in lines.splitlines()) for lines, name in told}
    assert words.pop("UNSPECIFIED") == "Never sent."
    assert words == {reason.value: row.meaning for reason, row in REASONS.items() if row.code is not None}


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_has_the_code_that_the_code_gives_it(reason: Reason) -> None:
    classes = {getattr(errors, name, None) for name in raised_classes()[reason]}
    assert None not in classes, f"{reason} is made by a helper: {raised_classes()[reason]}"
    assert classes, f"{reason} is never raised; a name that was given out once says so in the table"
    kinds = [kind for kind in classes if kind is not None and issubclass(kind, IcehouseError)]
    codes = {code_of(kind(reason, "")) for kind in kinds if not issubclass(kind, LOCAL)}
    row = REASONS[reason]
    assert codes <= {row.code}
    assert bool(codes) is (row.code is not None)
    if row.code is not None and any(issubclass(kind, LOCAL) for kind in kinds):
        assert row.is_also_local


def test_the_page_is_fresh() -> None:
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == markdown(), "run make gen"
