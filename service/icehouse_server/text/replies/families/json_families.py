"""Families that write calls as JSON objects."""

from __future__ import annotations

from icehouse_server.text.replies.core.family import Family
from icehouse_server.text.replies.notations.json_calls import JsonCalls
from icehouse_server.text.replies.notations.python_calls import PythonCalls
from icehouse_server.text.replies.notations.several import Several

_LLAMA_NOTATION = JsonCalls(
    starts=("<|python_tag|>",),
    ends=("<|eom_id|>", "<|eot_id|>"),
    arguments_key="parameters",
    is_bare=True,
)

HERMES = Family(
    name="hermes",
    tested_with="Qwen2.5-7B-Instruct, Qwen3-0.6B, Hermes-2-Pro-Llama-3-8B",
    models="Qwen 2.5, Qwen 3, Hermes 2 and 3, Granite 4",
    is_strict=True,
    notation=JsonCalls(("<tool_call>",), ("</tool_call>",)),
    call_start="<tool_call>",
    call_end="</tool_call>",
    shown=("<tool_call>", "</tool_call>", '"name"', '"arguments"'),
    aliases=("json_tools",),
)
SMOLLM = Family(
    name="smollm3",
    models="SmolLM3",
    tested_with="SmolLM3-3B",
    notation=Several(
        JsonCalls(("<tool_call>",), ("</tool_call>",)),
        PythonCalls(("<code>",), ("</code>",), is_list=False, is_code=True),
    ),
    call_start="<tool_call>",
    call_end="</tool_call>",
    shown=("\nReasoning Mode: ", "<tool_call>", "</tool_call>", '"name"', '"arguments"'),
    is_strict=True,
)
LLAMA = Family(
    name="llama3",
    tested_with="Llama-3.1-8B-Instruct, Llama-3.2-11B-Vision-Instruct",
    models="Llama 3.1, 3.2, 3.3",
    is_strict=True,
    notation=Several(_LLAMA_NOTATION, PythonCalls(is_bare=True)),
    call_start='{"name": "',
    shown=('{"name": function name, "parameters": dictionary of argument name and its value}',),
    tokens=("<|python_tag|>", "<|eom_id|>"),
)
COMMAND_A = Family(
    name="command-a",
    tested_with="c4ai-command-a-03-2025, command-a-reasoning-08-2025",
    models="Command R7B, Command A",
    is_strict=True,
    notation=JsonCalls(("<|START_ACTION|>",), ("<|END_ACTION|>",), arguments_key="parameters", is_list=True),
    call_start="<|START_ACTION|>",
    call_end="<|END_ACTION|>",
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
)
COMMAND_R = Family(
    name="command-r",
    tested_with="c4ai-command-r-v01",
    models="Command R, Command R+",
    is_strict=True,
    notation=JsonCalls(
        ("Action: ```json", "Action:```json", "Action:\n```json"),
        ("```",),
        arguments_key="parameters",
        is_list=True,
    ),
    call_start="Action:",
    call_end="```",
    shown=("Write 'Action:' followed by a json-formatted list of actions", '"tool_name"', '"parameters"'),
)
JAMBA = Family(
    name="jamba",
    tested_with="AI21-Jamba-Large-1.6",
    models="Jamba 1.5 and later",
    is_strict=True,
    notation=JsonCalls(("<tool_calls>",), ("</tool_calls>",), is_list=True),
    call_start="<tool_calls>",
    call_end="</tool_calls>",
    tokens=("<tool_calls>", "</tool_calls>"),
)
PHI = Family(
    name="phi4",
    models="Phi-4-mini",
    is_strict=True,
    notation=Several(
        JsonCalls(("<|tool_call|>",), ("<|/tool_call|>",), is_list=True),
        JsonCalls(("functools[{", "functools [{"), is_list=True, given_back="[{"),
    ),
    call_start="<|tool_call|>",
    call_end="<|/tool_call|>",
    shown=("<|tool_call|>", "<|/tool_call|>"),
    tokens=("<|tool_call|>", "<|/tool_call|>"),
)
GRANITE = Family(
    name="granite",
    models="Granite 3",
    is_strict=True,
    notation=Several(
        JsonCalls(("<|tool_call|>", "<function_call>"), is_list=True),
        JsonCalls(("<tool_call>",), ("</tool_call>",), is_foreign=True),
    ),
    call_start="<|tool_call|>",
    shown=("<|tool_call|>",),
    tokens=("<|tool_call|>", "<|start_of_role|>"),
)
FIREFUNCTION = Family(
    name="firefunction",
    models="FireFunction",
    is_strict=True,
    notation=JsonCalls(("<functioncall>",)),
    call_start="<functioncall>",
)
HAMMER = Family(
    name="hammer",
    tested_with="Hammer2.1",
    models="Hammer 2",
    is_strict=True,
    notation=JsonCalls(is_bare=True, is_list=True),
    call_start="[",
    shown=("please directly output an empty list", '{"name": "func_name1", "arguments": {'),
)

JSON_FAMILIES = (HERMES, SMOLLM, LLAMA, COMMAND_A, COMMAND_R, JAMBA, GRANITE, PHI, FIREFUNCTION, HAMMER)
