"""Families that write messages with headers."""

from __future__ import annotations

import regex

from icehouse_server.text.replies.core.channel_reply import ChannelReply
from icehouse_server.text.replies.core.family import Family
from icehouse_server.text.replies.families.tag_families import MUSE_NOTATION

HARMONY = Family(
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
        thought=regex.compile(r"<\|channel\|>\s{0,9}analysis"),
        call=regex.compile(r"\bto=(?:functions\.)?(?P<name>(?!(?:assistant|user|all)\b)[\w.\-]{1,200})"),
    ),
    thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    call_start=" to=functions.",
    call_end="<|call|>",
    tokens=("<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"),
)
MUSE = Family(
    name="muse",
    models="Muse Spark",
    layout=ChannelReply(
        header=regex.compile(r"(?:<\|start\|>)?(?:assistant)?\s{0,9}to=[^\s<]{1,200}<\|message\|>"),
        message_ends=("<|eom|>", "<|eot|>"),
        header_starts=("<|start|>",),
        thought=regex.compile(r"\bto=self<"),
        notation=MUSE_NOTATION,
    ),
    thoughts=("to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
    call_start="<atem:function_calls>",
    call_end="</atem:function_calls>",
    aliases=("muse_spark",),
)
FUNCTIONARY = Family(
    name="functionary",
    models="Functionary 3.2",
    is_strict=True,
    layout=ChannelReply(
        header=regex.compile(r"(?:>>>)?(?P<name>[\w.\-]{1,200})\n"),
        message_ends=(),
        header_starts=(">>>",),
        call=regex.compile(r"(?P<name>[\w.\-]{1,200})\n"),
        needs_offer=True,
        said="all",
    ),
    call_start=">>>",
    shown=(">>>${recipient}",),
)
FUNCTIONARY_2 = Family(
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
        said="all",
    ),
    call_start="<|recipient|>",
    tokens=("<|recipient|>", "<|content|>", "<|from|>"),
)

CHANNEL_FAMILIES = (HARMONY, MUSE, FUNCTIONARY, FUNCTIONARY_2)
