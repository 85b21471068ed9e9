"""Functions of a request for a response, those in namespaces too, and the names that the model knows them by.

Codex groups the tools of an MCP server in a namespace, and those for its sub-agents. The model sees such a
function with the namespace before its name; the caller finds both apart in the call.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

from icehouse_client import Tool

from icehouse_http.chat.turns import function_of
from icehouse_http.fields import Fields

_JOINT = "__"
_MOST_CHARACTERS = 64
_MARK_CHARACTERS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class CallName:
    """What the caller calls a function."""

    name: str
    namespace: str = ""

    @property
    def joined(self) -> str:
        """The name that the model sees, shortened where a server would refuse it."""
        if not self.namespace:
            return self.name
        name = f"{self.namespace}{_JOINT}{self.name}"
        if len(name) <= _MOST_CHARACTERS:
            return name
        mark = hashlib.sha256(name.encode()).hexdigest()[:_MARK_CHARACTERS]
        return f"{name[: _MOST_CHARACTERS - _MARK_CHARACTERS - 1]}_{mark}"

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a call."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclasses.dataclass(frozen=True, slots=True)
class Functions:
    """The functions that may be called."""

    tools: tuple[Tool, ...] = ()
    names: Mapping[str, CallName] = dataclasses.field(default_factory=dict)
    """By the name that the model sees."""
    places: tuple[str, ...] = ()
    """Where each is in the request."""

    def called(self, name: str) -> CallName:
        """Return what the caller calls a function that the model has called."""
        return self.names.get(name, CallName(name))


def functions_of(fields: Fields) -> Functions:
    """Return a request's functions. Tools that only OpenAI's servers run are left out, so none is called."""
    tools: list[Tool] = []
    names: dict[str, CallName] = {}
    places: list[str] = []
    for tool in fields.objects("tools"):
        is_group = tool.text("type") == "namespace"
        namespace = tool.required_text("name") if is_group else ""
        for function in tool.objects("tools") if is_group else [tool]:
            if function.text("type") == "function":
                known = function_of(function)
                name = CallName(known.name, namespace)
                names[name.joined] = name
                tools.append(dataclasses.replace(known, name=name.joined))
                places.append(function.place)
    return Functions(tuple(tools), names, tuple(places))


def call_name_of(item: Fields) -> CallName:
    """Return the name of the function that an item calls."""
    return CallName(item.required_text("name"), item.text("namespace"))
