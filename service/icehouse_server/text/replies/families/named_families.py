"""Families that write a call as the tool's name and then its arguments in JSON."""

from __future__ import annotations

import dataclasses

from icehouse_server.text.replies.core.family import Family
from icehouse_server.text.replies.notations.json_calls import JsonCalls
from icehouse_server.text.replies.notations.named_json import NamedJson
from icehouse_server.text.replies.notations.several import Several

MISTRAL = Family(
    name="mistral",
    tested_with="Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407",
    models="Mistral 7B v0.3, Nemo, Small, Magistral, Devstral, Ministral",
    is_strict=True,
    notation=Several(
        NamedJson(("[TOOL_CALLS]",), name_end="[ARGS]", id_start="[CALL_ID]"),
        NamedJson(("[TOOL_CALLS]",), name_end="", name_pattern=r"[\w.\-]{1,200}(?=\s{0,9}\{)"),
        JsonCalls(("[TOOL_CALLS]",), is_list=True, has_late_id=True),
    ),
    call_start="[TOOL_CALLS]",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
    aliases=("mistral",),
)

KIMI = Family(
    name="kimi",
    tested_with="Kimi-K2-Thinking",
    models="Kimi K2",
    is_strict=True,
    notation=NamedJson(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_end|>",),
        call_start="<|tool_call_begin|>",
        name_pattern=r"(?P<id>(?:functions\.)?(?P<name>[\w.\-]{1,200}):\d{1,9})",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
    ),
    call_start="<|tool_calls_section_begin|>",
    call_end="<|tool_calls_section_end|>",
    tokens=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    id_form="functions.{name}:{index}",
    aliases=("kimi_k2",),
)
_DEEPSEEK_STARTS = ("<｜tool▁calls▁begin｜>",)
_DEEPSEEK_ENDS = ("<｜tool▁calls▁end｜>",)
_DEEPSEEK_PLAIN = NamedJson(
    _DEEPSEEK_STARTS,
    _DEEPSEEK_ENDS,
    call_start="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
_DEEPSEEK_FENCED = dataclasses.replace(
    _DEEPSEEK_PLAIN,
    name_pattern=r"function\s{0,9}<｜tool▁sep｜>\s{0,9}(?P<name>[\w.\-]{1,200})",
    name_end="",
    is_fenced=True,
)
DEEPSEEK = Family(
    name="deepseek",
    models="DeepSeek V3, R1",
    is_strict=True,
    notation=Several(_DEEPSEEK_FENCED, _DEEPSEEK_PLAIN),
    call_start=_DEEPSEEK_STARTS[0],
    call_end=_DEEPSEEK_ENDS[0],
    tokens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
)
DEEPSEEK_31 = Family(
    name="deepseek-v3.1",
    models="DeepSeek V3.1",
    is_strict=True,
    notation=_DEEPSEEK_PLAIN,
    call_start=_DEEPSEEK_STARTS[0],
    call_end=_DEEPSEEK_ENDS[0],
    shown=("<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>",),
)
FUNCTIONARY_TAGS = Family(
    name="functionary-tags",
    models="Functionary 3.1, Llama 3.1 with functions of its own",
    is_strict=True,
    notation=NamedJson(("<function=",), name_end=">", call_end="</function>", is_lone=True),
    call_start="<function=",
    call_end="</function>",
    shown=("<function=", "</function>"),
)

NAMED_FAMILIES = (MISTRAL, KIMI, DEEPSEEK_31, DEEPSEEK, FUNCTIONARY_TAGS)
