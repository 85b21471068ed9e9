"""Families of models by the notation of their replies, in order of precedence."""

from __future__ import annotations

import dataclasses

import regex

from icehouse_server.text.replies.json_calls import JsonCalls, NamedJson
from icehouse_server.text.replies.notation import several
from icehouse_server.text.replies.python_calls import GemmaCalls, PythonCalls
from icehouse_server.text.replies.reply_format import ChannelReply, ReplyFamily
from icehouse_server.text.replies.tag_calls import TagCalls

_NAME = r"(?P<name>[^\s<>\"'=]{1,200})"
_QUOTED_NAME = r"[\"']?(?P<name>[^<>\"'\n]{1,200})[\"']?"
_KEY = r"(?P<name>[^<>\n]{1,200})"


def _keyed(prefix: str) -> TagCalls:
    """Return a notation with a tag for each key and one for each value."""
    return TagCalls(
        (f"<{prefix}tool_call>",),
        (f"</{prefix}tool_call>",),
        call_open=rf"{_NAME}(?=\s{{0,200}}(?:<{prefix}arg_key>|</{prefix}tool_call>))",
        call_close="",
        argument_open=rf"<{prefix}arg_key>{_KEY}</{prefix}arg_key>\s{{0,200}}<{prefix}arg_value>",
        value_open=f"<{prefix}arg_value>",
        argument_close=f"</{prefix}arg_value>",
    )


def _invoked(section: str, prefix: str, *, kind: str = "") -> TagCalls:
    """Return a notation with `invoke` and `parameter` tags; `kind` is a pattern of what follows a name."""
    return TagCalls(
        (f"<{section}>",),
        (f"</{section}>",),
        call_open=rf"<{prefix}invoke name={_QUOTED_NAME}>",
        call_close=f"</{prefix}invoke>",
        argument_open=rf"<{prefix}parameter name={_QUOTED_NAME}{kind}>",
        value_open=f"<{prefix}parameter name=",
        argument_close=f"</{prefix}parameter>",
    )


_QWEN = TagCalls(
    ("<tool_call>",),
    ("</tool_call>",),
    call_open=rf"<function={_NAME}>",
    call_close="</function>",
    argument_open=rf"<parameter={_KEY}>",
    value_open="<parameter=",
    argument_close="</parameter>",
    has_line_breaks=True,
    is_python=True,
)
_QWEN_UNWRAPPED = dataclasses.replace(_QWEN, starts=("<function=",), begins_with_call=True, is_foreign=True)
_HERMES = JsonCalls(("<tool_call>",), ("</tool_call>",))
_FOREIGN_HERMES = dataclasses.replace(_HERMES, is_foreign=True)
_DSML = "｜DSML｜"
_DEEPSEEK = NamedJson(
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>",),
    call_start="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
_FENCED_DEEPSEEK = dataclasses.replace(
    _DEEPSEEK,
    name_pattern=r"function\s{0,9}<｜tool▁sep｜>\s{0,9}(?P<name>[\w.\-]{1,200})",
    name_end="",
    is_fenced=True,
)

_CHANNELS = (
    ReplyFamily(
        name="harmony",
        models="gpt-oss",
        is_strict=True,
        layout=ChannelReply(
            header=regex.compile(
                r"\s{0,9}(?:<\|start\|>)?(?:assistant)?(?:\s{0,9}to=[^\s<]{1,200})?\s{0,9}"
                r"(?:<\|(?:channel|constrain)\|>[^<]{0,200}){0,4}<\|message\|>"
            ),
            message_ends=("<|end|>", "<|return|>", "<|call|>"),
            header_starts=("<|start|>", "<|channel|>"),
            reasoning=regex.compile(r"<\|channel\|>\s{0,9}analysis"),
            call=regex.compile(r"\bto=(?:functions\.)?(?P<name>(?!(?:assistant|user|all)\b)[\w.\-]{1,200})"),
        ),
        thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        own_call_start=" to=functions.",
        own_call_end="<|call|>",
        tokens=("<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"),
    ),
    ReplyFamily(
        name="muse",
        models="Muse Spark",
        layout=ChannelReply(
            header=regex.compile(r"(?:<\|start\|>)?(?:assistant)?\s{0,9}to=[^\s<]{1,200}<\|message\|>"),
            message_ends=("<|eom|>", "<|eot|>"),
            header_starts=("<|start|>",),
            reasoning=regex.compile(r"\bto=self<"),
            notation=_invoked("atem:function_calls", "atem:"),
        ),
        thoughts=("to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
        own_call_start="<atem:function_calls>",
        own_call_end="</atem:function_calls>",
        aliases=("muse_spark",),
    ),
    ReplyFamily(
        name="functionary",
        models="Functionary 3.2",
        is_strict=True,
        layout=ChannelReply(
            header=regex.compile(r"(?:>>>)?(?P<name>[\w.\-]{1,200})\n"),
            message_ends=(),
            header_starts=(">>>",),
            call=regex.compile(r"(?P<name>[\w.\-]{1,200})\n"),
            needs_offer=True,
            user_recipient="all",
        ),
        own_call_start=">>>",
        shown=(">>>${recipient}",),
    ),
    ReplyFamily(
        name="functionary-2",
        models="Functionary 2",
        is_strict=True,
        layout=ChannelReply(
            header=regex.compile(
                r"\s{0,9}(?:<\|from\|>assistant\n)?(?:<\|recipient\|>)?(?P<name>[\w.\-]{1,200})\n<\|content\|>"
            ),
            message_ends=("<|stop|>",),
            header_starts=("\n<|from|>assistant", "<|from|>assistant"),
            call=regex.compile(r"(?P<name>[\w.\-]{1,200})\n<\|content\|>"),
            user_recipient="all",
        ),
        own_call_start="<|recipient|>",
        tokens=("<|recipient|>", "<|content|>", "<|from|>"),
    ),
)
"""Families that write messages with headers."""

_TAGS = (
    ReplyFamily(
        name="qwen-tags",
        tested_with="Qwen3.5-4B",
        models="Qwen3-Coder, Qwen 3.5",
        notation=several(_FOREIGN_HERMES, _QWEN_UNWRAPPED, _QWEN),
        shown=("<tool_call>", "<function=", "<parameter="),
        aliases=("qwen3_coder",),
    ),
    ReplyFamily(
        name="glm",
        tested_with="GLM-5.1",
        models="GLM 4.5 to 5, Laguna",
        notation=several(_FOREIGN_HERMES, _keyed("")),
        shown=("<tool_call>", "<arg_key>", "<arg_value>"),
        tokens=("<arg_key>", "<arg_value>"),
        aliases=("glm47", "laguna"),
    ),
    ReplyFamily(
        name="longcat",
        models="LongCat Flash",
        notation=several(
            JsonCalls(("<longcat_tool_call>",), ("</longcat_tool_call>",), is_foreign=True),
            _keyed("longcat_"),
        ),
        shown=("<longcat_tool_call>", "<longcat_arg_key>"),
        tokens=("<longcat_tool_call>", "<longcat_arg_key>"),
    ),
    ReplyFamily(
        name="minimax",
        models="MiniMax M2",
        notation=_invoked("minimax:tool_call", ""),
        shown=("<minimax:tool_call>", "<invoke name="),
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
        aliases=("minimax_m2",),
    ),
    ReplyFamily(
        name="deepseek-tags",
        models="DeepSeek V3.2",
        notation=_invoked(f"{_DSML}function_calls", _DSML, kind=r'(?: string="(?P<type>\w{1,9})")?'),
        shown=(f"<{_DSML}function_calls>",),
    ),
    ReplyFamily(
        name="kimi-tags",
        models="Kimi K3",
        notation=TagCalls(
            ("<|open|>tools<|sep|>",),
            ("<|close|>tools<|sep|>",),
            call_open=r'<\|open\|>call tool="(?P<name>[^"<>]{1,200})"[^<>]{0,200}<\|sep\|>',
            call_close="<|close|>call<|sep|>",
            argument_open=(
                r'<\|open\|>argument key="(?P<name>[^"<>]{1,200})"(?: type="(?P<type>\w{1,20})")?'
                r"[^<>]{0,200}<\|sep\|>"
            ),
            value_open="<|open|>argument key=",
            argument_close="<|close|>argument<|sep|>",
        ),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        aliases=("kimi_k3",),
    ),
    ReplyFamily(
        name="minicpm-tags",
        models="MiniCPM 5",
        notation=TagCalls(
            ("<function name=",),
            call_open=rf"<function name={_QUOTED_NAME}>",
            call_close="</function>",
            argument_open=rf"<param name={_QUOTED_NAME}>",
            value_open="<param name=",
            argument_close="</param>",
            begins_with_call=True,
            has_cdata=True,
        ),
        own_call_end="</function>",
        shown=('<function name="', '<param name="'),
        aliases=("minicpm5",),
    ),
)
"""Families that write calls in tags, and values without types."""

_NAMED = (
    ReplyFamily(
        name="mistral",
        tested_with="Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407",
        models="Mistral 7B v0.3, Nemo, Small, Magistral, Devstral, Ministral",
        is_strict=True,
        notation=several(
            NamedJson(("[TOOL_CALLS]",), name_end="[ARGS]", id_start="[CALL_ID]"),
            NamedJson(("[TOOL_CALLS]",), name_pattern=r"[\w.\-]{1,200}(?=\s{0,9}\{)"),
            JsonCalls(("[TOOL_CALLS]",), is_list=True, has_late_id=True),
        ),
        tokens=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ReplyFamily(
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
        tokens=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        id_form="functions.{name}:{index}",
        aliases=("kimi_k2",),
    ),
    ReplyFamily(
        name="deepseek-v3.1",
        models="DeepSeek V3.1",
        is_strict=True,
        notation=_DEEPSEEK,
        shown=("<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>",),
    ),
    ReplyFamily(
        name="deepseek",
        models="DeepSeek V3, R1",
        is_strict=True,
        notation=several(_FENCED_DEEPSEEK, _DEEPSEEK),
        tokens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    ReplyFamily(
        name="functionary-tags",
        models="Functionary 3.1, Llama 3.1 with functions of its own",
        is_strict=True,
        notation=NamedJson(("<function=",), name_end=">", call_end="</function>", is_lone=True),
        own_call_end="</function>",
        shown=("<function=", "</function>"),
    ),
)
"""Families that write a call as the tool's name and then its arguments in JSON."""

_PYTHON = (
    ReplyFamily(
        name="minicpm3",
        tested_with="MiniCPM3-4B",
        models="MiniCPM3",
        notation=PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_list=False),
        shown=("<|tool_call_start|>\n```python\n",),
    ),
    ReplyFamily(
        name="lfm2",
        tested_with="LFM2.5-VL-450M",
        models="LFM2, LFM2.5",
        notation=several(
            JsonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_list=True, is_foreign=True),
            PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        ),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        aliases=("pythonic",),
    ),
    ReplyFamily(
        name="function-gemma",
        models="FunctionGemma",
        notation=GemmaCalls(("<start_function_call>",), ("<end_function_call>",), quote="<escape>"),
        shown=("<start_function_call>",),
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
        aliases=("function_gemma",),
    ),
    ReplyFamily(
        name="gemma4",
        models="Gemma 4",
        notation=GemmaCalls(("<|tool_call>",), ("<tool_call|>",), quote='<|"|>'),
        tokens=("<|tool_call>", "<tool_call|>"),
    ),
    ReplyFamily(
        name="llama4",
        models="Llama 4, Llama 3.2 (1B, 3B) with lists of calls",
        notation=several(
            PythonCalls(("<|python_start|>",), ("<|python_end|>",), is_bare=True),
            JsonCalls(("<|python_start|>",), ("<|python_end|>",), arguments_key="parameters"),
        ),
        own_call_start="[",
        own_call_end="",
        shown=("[func_name1(params_name1=params_value1",),
        tokens=("<|python_start|>", "<|python_end|>"),
    ),
    ReplyFamily(
        name="gemma3",
        models="Gemma 3, asked for calls in a code fence",
        notation=PythonCalls(("```tool_code",), ("```",), is_list=False, is_bare=True),
        shown=("```tool_code",),
    ),
)
"""Families that write calls in the syntax of functions."""

_JSON = (
    ReplyFamily(
        name="hermes",
        tested_with="Qwen2.5-7B-Instruct, Qwen3-0.6B, Hermes-2-Pro-Llama-3-8B",
        models="Qwen 2.5, Qwen 3, Hermes 2 and 3, Granite 4",
        is_strict=True,
        notation=_HERMES,
        shown=("<tool_call>", "</tool_call>", '"name"', '"arguments"'),
        aliases=("json_tools",),
    ),
    ReplyFamily(
        name="smollm3",
        models="SmolLM3",
        tested_with="SmolLM3-3B",
        notation=several(_HERMES, PythonCalls(("<code>",), ("</code>",), is_list=False, is_code=True)),
        shown=("\nReasoning Mode: ", "<tool_call>", "</tool_call>", '"name"', '"arguments"'),
        is_strict=True,
    ),
    ReplyFamily(
        name="llama3",
        tested_with="Llama-3.1-8B-Instruct, Llama-3.2-11B-Vision-Instruct",
        models="Llama 3.1, 3.2, 3.3",
        is_strict=True,
        notation=several(
            JsonCalls(
                ("<|python_tag|>",), ("<|eom_id|>", "<|eot_id|>"), arguments_key="parameters", is_bare=True
            ),
            PythonCalls(is_bare=True),
        ),
        own_call_start='{"name": "',
        own_call_end="",
        shown=('{"name": function name, "parameters": dictionary of argument name and its value}',),
        tokens=("<|python_tag|>", "<|eom_id|>"),
    ),
    ReplyFamily(
        name="command-a",
        tested_with="c4ai-command-a-03-2025, command-a-reasoning-08-2025",
        models="Command R7B, Command A",
        is_strict=True,
        notation=JsonCalls(
            ("<|START_ACTION|>",), ("<|END_ACTION|>",), arguments_key="parameters", is_list=True
        ),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    ReplyFamily(
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
        own_call_start="Action:",
        shown=("Write 'Action:' followed by a json-formatted list of actions", '"tool_name"', '"parameters"'),
    ),
    ReplyFamily(
        name="jamba",
        tested_with="AI21-Jamba-Large-1.6",
        models="Jamba 1.5 and later",
        is_strict=True,
        notation=JsonCalls(("<tool_calls>",), ("</tool_calls>",), is_list=True),
        tokens=("<tool_calls>", "</tool_calls>"),
    ),
    ReplyFamily(
        name="granite",
        models="Granite 3",
        is_strict=True,
        notation=several(JsonCalls(("<|tool_call|>", "<function_call>"), is_list=True), _FOREIGN_HERMES),
        own_call_end="",
        shown=("<|tool_call|>",),
        tokens=("<|tool_call|>", "<|start_of_role|>"),
    ),
    ReplyFamily(
        name="phi4",
        models="Phi-4-mini",
        is_strict=True,
        notation=several(
            JsonCalls(("<|tool_call|>",), ("<|/tool_call|>",), is_list=True),
            JsonCalls(("functools[{", "functools [{"), is_list=True, put_back_text="[{"),
        ),
        shown=("<|tool_call|>", "<|/tool_call|>"),
        tokens=("<|tool_call|>", "<|/tool_call|>"),
    ),
    ReplyFamily(
        name="firefunction",
        models="FireFunction",
        is_strict=True,
        notation=JsonCalls(("<functioncall>",)),
    ),
    ReplyFamily(
        name="hammer",
        tested_with="Hammer2.1",
        models="Hammer 2",
        is_strict=True,
        notation=JsonCalls(is_bare=True, is_list=True),
        own_call_start="[",
        shown=("please directly output an empty list", '{"name": "func_name1", "arguments": {'),
    ),
)
"""Families that write calls as JSON objects."""

FAMILIES = (*_CHANNELS, *_TAGS, *_NAMED, *_PYTHON, *_JSON)
