"""Tools as dicts: with the fields of `Tool` or of the API's message, and as OpenAI's API has them.

A field that is None counts as not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from icehouse.v1 import tool_pb2

from icehouse_client.chat import Tool, mode_choice
from icehouse_client.options import hint_of

GivenTool = Tool | Mapping[str, Any]
"""A function that the model may ask to be called."""

ToolChoice = Literal["auto", "none", "required"] | Tool | Mapping[str, Any]
"""Whether tools are called; a `Tool`, or a dict as OpenAI's API has it, is the one that must be."""

_FIELDS = ("name", "description", "parameters", "parameters_json", "strict", "found_later")
_MEANT = {"input_schema": "parameters", "inputSchema": "parameters"}
"""Our field by its name in other APIs."""
_KINDS: Mapping[str, type] = {
    "name": str,
    "description": str,
    "parameters": Mapping,
    "strict": bool,
    "found_later": bool,
}
_WORDS = {str: "text", Mapping: "object", bool: "True or False"}


def tools_of(tools: Sequence[GivenTool], place: str = "tools") -> list[Tool]:
    """Return the tools; raises ValueError for a dict that is none, which it names by its place."""
    return [
        tool_of(tool, f"{place}[{index}]") if isinstance(tool, Mapping) else tool
        for index, tool in enumerate(tools)
    ]


def tool_of(facts: Mapping[str, Any], place: str) -> Tool:
    """Return the tool that a dict is; raises ValueError with its place for what is none."""
    given = dict(_function(facts, place, _FIELDS))
    if "parameters_json" in given:
        if "parameters" in given:
            raise ValueError(f"{place} has both parameters and parameters_json")
        if text := given.pop("parameters_json"):
            given["parameters"] = _parsed(text, place)
    for name, kind in _KINDS.items():
        if name in given and not isinstance(given[name], kind):
            raise ValueError(f"{place}.{name} is {type(given[name]).__name__}, not {_WORDS[kind]}")
    if not given.get("name"):
        raise ValueError(f"{place} has no name")
    return Tool(**given)


def choice_proto(choice: ToolChoice) -> tool_pb2.ToolChoice:
    """Return the choice as a message; raises ValueError for what is none."""
    if isinstance(choice, Mapping):
        name = _function(choice, "tool_choice", ("name",)).get("name")
        if not isinstance(name, str) or not name:
            raise ValueError('tool_choice has no name; it is {"type": "function", "function": {"name": ...}}')
        choice = Tool(name)
    if isinstance(choice, Tool):
        return tool_pb2.ToolChoice(mode=tool_pb2.TOOL_CHOICE_MODE_NAMED, name=choice.name)
    return mode_choice(choice)


def _function(facts: Mapping[str, Any], place: str, fields: Sequence[str]) -> Mapping[str, Any]:
    """Return what is said of the function, be it in an object of its own or beside its type."""
    given = _given(facts)
    kind = given.pop("type", "function")
    if kind != "function":
        raise ValueError(f"{place} is of type {kind!r}; only a function can be called")
    if "function" in given:
        _refuse_unknown(given, place, ("function",))
        if not isinstance(given["function"], Mapping):
            raise ValueError(f"{place}.function is not an object")
        given, place = _given(given["function"]), f"{place}.function"
    _refuse_unknown(given, place, fields)
    return given


def _given(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _refuse_unknown(given: Mapping[str, Any], place: str, known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            hint = hint_of(_MEANT.get(name, str(name)), known)
            raise ValueError(f"{place} has {name!r}, which is not known; {hint}")


def _parsed(text: object, place: str) -> Any:
    try:
        return json.loads(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{place}.parameters_json is not JSON: {error}") from None
