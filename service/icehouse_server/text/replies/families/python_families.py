"""Families that write calls as functions are called: Python's way, and Gemma's."""

from __future__ import annotations

from icehouse_server.text.replies.core.family import Family
from icehouse_server.text.replies.notations.gemma_calls import GemmaCalls
from icehouse_server.text.replies.notations.json_calls import JsonCalls
from icehouse_server.text.replies.notations.python_calls import PythonCalls
from icehouse_server.text.replies.notations.several import Several

LFM = Family(
    name="lfm2",
    tested_with="LFM2.5-VL-450M",
    models="LFM2, LFM2.5",
    notation=Several(
        JsonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_list=True, is_foreign=True),
        PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    ),
    call_start="<|tool_call_start|>",
    call_end="<|tool_call_end|>",
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    aliases=("pythonic",),
)
MINICPM = Family(
    name="minicpm3",
    tested_with="MiniCPM3-4B",
    models="MiniCPM3",
    notation=PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_list=False),
    call_start="<|tool_call_start|>",
    call_end="<|tool_call_end|>",
    shown=("<|tool_call_start|>\n```python\n",),
)
LLAMA4 = Family(
    name="llama4",
    models="Llama 4, Llama 3.2 (1B, 3B) with lists of calls",
    notation=Several(
        PythonCalls(("<|python_start|>",), ("<|python_end|>",), is_bare=True),
        JsonCalls(("<|python_start|>",), ("<|python_end|>",), arguments_key="parameters"),
    ),
    call_start="[",
    shown=("[func_name1(params_name1=params_value1",),
    tokens=("<|python_start|>", "<|python_end|>"),
)
GEMMA3 = Family(
    name="gemma3",
    models="Gemma 3, asked for calls in a code fence",
    notation=PythonCalls(("```tool_code",), ("```",), is_list=False, is_bare=True),
    call_start="```tool_code",
    call_end="```",
    shown=("```tool_code",),
)
FUNCTION_GEMMA = Family(
    name="function-gemma",
    models="FunctionGemma",
    notation=GemmaCalls(("<start_function_call>",), ("<end_function_call>",), "<escape>"),
    call_start="<start_function_call>",
    call_end="<end_function_call>",
    shown=("<start_function_call>",),
    tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    aliases=("function_gemma",),
)
GEMMA4 = Family(
    name="gemma4",
    models="Gemma 4",
    notation=GemmaCalls(("<|tool_call>",), ("<tool_call|>",), '<|"|>'),
    call_start="<|tool_call>",
    call_end="<tool_call|>",
    tokens=("<|tool_call>", "<tool_call|>"),
    aliases=("gemma4",),
)

PYTHON_FAMILIES = (MINICPM, LFM, FUNCTION_GEMMA, GEMMA4, LLAMA4, GEMMA3)
