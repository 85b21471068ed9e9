"""Families that write calls in tags, values without types."""

from __future__ import annotations

import dataclasses

from icehouse_server.text.replies.core.family import Family
from icehouse_server.text.replies.notations.json_calls import JsonCalls
from icehouse_server.text.replies.notations.several import Several
from icehouse_server.text.replies.notations.tag_calls import TagCalls

_NAME = r"(?P<name>[^\s<>\"'=]{1,200})"
_QUOTED_NAME = r"[\"']?(?P<name>[^<>\"'\n]{1,200})[\"']?"
_KEY = r"(?P<name>[^<>\n]{1,200})"

_QWEN = TagCalls(
    starts=("<tool_call>",),
    ends=("</tool_call>",),
    call_open=rf"<function={_NAME}>",
    call_close="</function>",
    argument_open=rf"<parameter={_KEY}>",
    value_open="<parameter=",
    argument_close="</parameter>",
    has_line_breaks=True,
    is_python=True,
)
_QWEN_UNWRAPPED = dataclasses.replace(_QWEN, starts=("<function=",), begins_with_call=True, is_foreign=True)
_GLM = TagCalls(
    starts=("<tool_call>",),
    ends=("</tool_call>",),
    call_open=rf"{_NAME}(?=\s{{0,200}}(?:<arg_key>|</tool_call>))",
    call_close="",
    argument_open=rf"<arg_key>{_KEY}</arg_key>\s{{0,200}}<arg_value>",
    value_open="<arg_value>",
    argument_close="</arg_value>",
)
_LONGCAT = TagCalls(
    starts=("<longcat_tool_call>",),
    ends=("</longcat_tool_call>",),
    call_open=rf"{_NAME}(?=\s{{0,200}}(?:<longcat_arg_key>|</longcat_tool_call>))",
    call_close="",
    argument_open=rf"<longcat_arg_key>{_KEY}</longcat_arg_key>\s{{0,200}}<longcat_arg_value>",
    value_open="<longcat_arg_value>",
    argument_close="</longcat_arg_value>",
)
_DSML = "｜DSML｜"

QWEN_TAGS = Family(
    name="qwen-tags",
    tested_with="Qwen3.5-4B",
    models="Qwen3-Coder, Qwen 3.5",
    notation=Several(JsonCalls(("<tool_call>",), ("</tool_call>",), is_foreign=True), _QWEN_UNWRAPPED, _QWEN),
    call_start="<tool_call>",
    call_end="</tool_call>",
    shown=("<tool_call>", "<function=", "<parameter="),
    aliases=("qwen3_coder",),
)
GLM = Family(
    name="glm",
    tested_with="GLM-5.1",
    models="GLM 4.5 to 5, Laguna",
    notation=Several(JsonCalls(("<tool_call>",), ("</tool_call>",), is_foreign=True), _GLM),
    call_start="<tool_call>",
    call_end="</tool_call>",
    shown=("<tool_call>", "<arg_key>", "<arg_value>"),
    tokens=("<arg_key>", "<arg_value>"),
    aliases=("glm47", "laguna"),
)
LONGCAT = Family(
    name="longcat",
    models="LongCat Flash",
    notation=Several(
        JsonCalls(("<longcat_tool_call>",), ("</longcat_tool_call>",), is_foreign=True), _LONGCAT
    ),
    call_start="<longcat_tool_call>",
    call_end="</longcat_tool_call>",
    shown=("<longcat_tool_call>", "<longcat_arg_key>"),
    tokens=("<longcat_tool_call>", "<longcat_arg_key>"),
)
MINIMAX = Family(
    name="minimax",
    models="MiniMax M2",
    notation=TagCalls(
        starts=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
        call_open=rf"<invoke name={_QUOTED_NAME}>",
        call_close="</invoke>",
        argument_open=rf"<parameter name={_QUOTED_NAME}>",
        value_open="<parameter name=",
        argument_close="</parameter>",
    ),
    call_start="<minimax:tool_call>",
    call_end="</minimax:tool_call>",
    shown=("<minimax:tool_call>", "<invoke name="),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    aliases=("minimax_m2",),
)
DEEPSEEK_TAGS = Family(
    name="deepseek-tags",
    models="DeepSeek V3.2",
    notation=TagCalls(
        starts=(f"<{_DSML}function_calls>",),
        ends=(f"</{_DSML}function_calls>",),
        call_open=rf"<{_DSML}invoke name={_QUOTED_NAME}>",
        call_close=f"</{_DSML}invoke>",
        argument_open=rf'<{_DSML}parameter name={_QUOTED_NAME}(?: string="(?P<type>\w{{1,9}})")?>',
        value_open=f"<{_DSML}parameter name=",
        argument_close=f"</{_DSML}parameter>",
    ),
    call_start=f"<{_DSML}function_calls>",
    call_end=f"</{_DSML}function_calls>",
    shown=(f"<{_DSML}function_calls>",),
)
MUSE_NOTATION = TagCalls(
    starts=("<atem:function_calls>",),
    ends=("</atem:function_calls>",),
    call_open=rf"<atem:invoke name={_QUOTED_NAME}>",
    call_close="</atem:invoke>",
    argument_open=rf"<atem:parameter name={_QUOTED_NAME}>",
    value_open="<atem:parameter name=",
    argument_close="</atem:parameter>",
)
KIMI_TAGS = Family(
    name="kimi-tags",
    models="Kimi K3",
    notation=TagCalls(
        starts=("<|open|>tools<|sep|>",),
        ends=("<|close|>tools<|sep|>",),
        call_open=r'<\|open\|>call tool="(?P<name>[^"<>]{1,200})"[^<>]{0,200}<\|sep\|>',
        call_close="<|close|>call<|sep|>",
        argument_open=(
            r'<\|open\|>argument key="(?P<name>[^"<>]{1,200})"(?: type="(?P<type>\w{1,20})")?'
            r"[^<>]{0,200}<\|sep\|>"
        ),
        value_open="<|open|>argument key=",
        argument_close="<|close|>argument<|sep|>",
    ),
    call_start="<|open|>tools<|sep|>",
    call_end="<|close|>tools<|sep|>",
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    aliases=("kimi_k3",),
)
MINICPM_TAGS = Family(
    name="minicpm-tags",
    models="MiniCPM 5",
    notation=TagCalls(
        starts=("<function name=",),
        ends=(),
        call_open=rf"<function name={_QUOTED_NAME}>",
        call_close="</function>",
        argument_open=rf"<param name={_QUOTED_NAME}>",
        value_open="<param name=",
        argument_close="</param>",
        begins_with_call=True,
        has_cdata=True,
    ),
    call_start="<function name=",
    call_end="</function>",
    shown=('<function name="', '<param name="'),
    aliases=("minicpm5",),
)

TAG_FAMILIES = (
    QWEN_TAGS,
    GLM,
    LONGCAT,
    MINIMAX,
    DEEPSEEK_TAGS,
    KIMI_TAGS,
    MINICPM_TAGS,
)
