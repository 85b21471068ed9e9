"""Field names: what a caller calls the fields of its request that the server has other names for.

One turn may be several messages and several items may be one, and what cannot be sent is left out, so the
server counts messages and tools otherwise than the caller does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from icehouse_client import Message

_TURN = re.compile(r"prompt\.chat\.messages\[(\d+)\](?:\.(\w+)(\[\d+\])?)?")
_TOOL = re.compile(r"prompt\.tools\[(\d+)\](?:\.(\w+))?")
_PREFIXES = ("prompt.chat.", "prompt.", "sampling.")
"""What stands before fields of the server and means nothing to a caller of another API."""
_LISTED = "tool_calls"
"""What of a message is a list in every API that has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A message for the server, and the place in the caller's request that it comes from."""

    message: Message
    place: str


@dataclasses.dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of one request."""

    turns: Sequence[str] = ()
    """The places of the messages that the server is sent, in order."""
    turn_fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The names of a message's fields; one that is not listed is the turn."""
    tools: Sequence[str] = ()
    """The places of the tools that the server is sent, in order."""
    schema: str = "parameters"
    """What a tool's schema is called."""
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other fields by the server's names; one in another is called like it."""

    def name_of(self, field: str) -> str:
        """Return the caller's name of a field, as exactly as that is known."""
        if (turn := _TURN.match(field)) and int(turn[1]) < len(self.turns):
            place, name = self.turns[int(turn[1])], self.turn_fields.get(turn[2] or "")
            index = turn[3] or "" if turn[2] == _LISTED else ""
            return f"{place}.{name}{index}" if name else place
        if (tool := _TOOL.match(field)) and int(tool[1]) < len(self.tools):
            place, name = self.tools[int(tool[1])], tool[2]
            return f"{place}.{self.schema if name == 'parameters_json' else name}" if name else place
        for known in sorted(self.others, key=len, reverse=True):
            rest = re.fullmatch(rf"{re.escape(known)}(\[\d+\])?(?:[.\[].*)?", field)
            if rest is not None:
                return self.others[known] + (rest[1] or "")
        for prefix in _PREFIXES:
            field = field.removeprefix(prefix)
        return field

    def in_words(self, message: str, field: str) -> str:
        """Return what the server says of a field, with the caller's name of it."""
        return re.sub(rf"(?<![\w.]){re.escape(field)}(?![\w\[])", lambda _: self.name_of(field), message)


NO_NAMES = FieldNames()
"""Of a request whose fields have the server's names."""
