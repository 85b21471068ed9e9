"""Families that write a call as the tool's name and then its arguments in JSON."""

from __future__ import annotations

from icehouse_server.text.replies.core.family import Family
from icehouse_server.text.replies.notations.json_calls import JsonCalls
from icehouse_server.text.replies.notations.named_json import NamedJson
from icehouse_server.text.replies.notations.several import Several

MISTRAL = Family(
    name="mistral",
    models="Mistral 7B v0.3, Nemo, Small, Magistral, Devstral, Ministral",
    notation=Several(
        NamedJson(("[TOOL_CALLS]",), name_end="[ARGS]", id_start="[CALL_ID]"),
        JsonCalls(("[TOOL_CALLS]",), is_list=True, has_late_id=True),
    ),
    call_start="[TOOL_CALLS]",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
    aliases=("mistral",),
)

NAMED_FAMILIES = (MISTRAL,)
