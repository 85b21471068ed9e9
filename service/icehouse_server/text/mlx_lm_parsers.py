"""Parsers of mlx-lm: its text state machine and tool parsers, behind a format of ours.

As in `upstream`: `tests/unit/text/test_mlx_lm_parsers.py` fails when what is relied on moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from icehouse_server.text.reply_format import ReplyFormat, TextMachine


def read_reply_format(wrapper: Any) -> ReplyFormat:
    """Return how this tokenizer's model marks reasoning and tool calls, as far as mlx-lm knows."""
    with_tools = make_text_state_machine(wrapper)  # type: ignore[no-untyped-call]
    # The same tokenizer as the machine sees it, but for the tools.
    view = SimpleNamespace(
        has_thinking=wrapper.has_thinking,
        think_start=wrapper.think_start,
        think_end=wrapper.think_end,
        has_tool_calling=False,
        structural_markers=wrapper.structural_markers,
        response_transitions={
            state: [edge for edge in edges if edge[1] != "tool"]
            for state, edges in wrapper.response_transitions.items()
        },
    )
    without_tools = make_text_state_machine(view)  # type: ignore[no-untyped-call]
    initial = wrapper.response_initial_state or ""
    markers = [wrapper.think_start, wrapper.think_end, *wrapper.structural_markers]
    markers += [text for edges in wrapper.response_transitions.values() for text, _ in edges]
    call_markers = [wrapper.tool_call_start, wrapper.tool_call_end]
    special = _special_tokens(wrapper)
    return ReplyFormat(
        think_start=wrapper.think_start or "",
        think_end=wrapper.think_end or "",
        call_start=wrapper.tool_call_start or "",
        call_end=wrapper.tool_call_end or "",
        parser_name=str(wrapper.init_kwargs.get("tool_parser_type") or ""),
        parse=wrapper.tool_parser,
        make_machine=lambda has_tools, state: TextMachine(
            (with_tools if has_tools else without_tools).make_state(state or initial or "normal"),
            split=TextStateMachine.split,
            flush=TextStateMachine.flush,
        ),
        hidden_markers={
            False: _contains(markers, special),
            True: _contains([*markers, *call_markers], special),
        },
        initial_state=initial,
    )


def _special_tokens(wrapper: Any) -> list[str]:
    """Return the spellings that decoding hides when told to hide special tokens."""
    added = wrapper.added_tokens_decoder.values()
    return [*wrapper.all_special_tokens, *(token.content for token in added if token.special)]


def _contains(texts: Sequence[str | None], parts: Sequence[str]) -> bool:
    return any(part in text for text in texts if text for part in parts if part)
