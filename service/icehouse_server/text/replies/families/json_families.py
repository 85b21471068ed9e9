"""Families that write calls as JSON objects."""

from __future__ import annotations

from icehouse_server.text.replies.core.family import Family
from icehouse_server.text.replies.notations.json_calls import JsonCalls

_LLAMA_NOTATION = JsonCalls(
    starts=("<|python_tag|>",),
    ends=("<|eom_id|>", "<|eot_id|>"),
    arguments_key="parameters",
    is_bare=True,
)

HERMES = Family(
    name="hermes",
    models="Qwen 2.5, Qwen 3, Hermes 2 and 3, SmolLM3, Granite 4",
    notation=JsonCalls(("<tool_call>",), ("</tool_call>",)),
    call_start="<tool_call>",
    call_end="</tool_call>",
    shown=("<tool_call>", "</tool_call>", '"name"', '"arguments"'),
    aliases=("json_tools",),
)
LLAMA = Family(
    name="llama3",
    models="Llama 3.1, 3.2, 3.3",
    notation=_LLAMA_NOTATION,
    call_start='{"name": "',
    shown=('{"name": function name, "parameters": dictionary of argument name and its value}',),
    tokens=("<|python_tag|>", "<|eom_id|>"),
)
JSON_FAMILIES = (HERMES, LLAMA)
