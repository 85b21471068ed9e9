"""Parsers of mlx-lm: its text state machine and tool parsers, behind a format of ours.

As in `upstream`: `tests/unit/text/test_mlx_lm_parsers.py` fails when what is relied on moves.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from icehouse_server.text.reply_format import ParseCalls, ReplyFormat, TextMachine

SEARCH_LIMIT_S = 0.5
"""Processor time for the first regular expression of a section's parser, on the event loop: for 4,000 letters
mistral's took 2.5 s."""
_LEAST_SEARCH_S = 0.02
"""For every later one: far more than any takes in a call that a model means."""
_SEARCHES = frozenset({"findall", "finditer", "fullmatch", "match", "search", "split", "sub"})


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
        parse=_bounded(wrapper.tool_parser),
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


class _Parsing(threading.local):
    """What this thread parses."""

    search_count = 0


_parsing = _Parsing()


class _BoundedPattern:
    """A regular expression of upstream's, whose searches raise TimeoutError where they take too long."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pattern, name)
        if name not in _SEARCHES:
            return found
        _parsing.search_count += 1
        # Each less than the one before, so that many of them are bounded too.
        limit_s = max(SEARCH_LIMIT_S / _parsing.search_count, _LEAST_SEARCH_S)
        return functools.partial(found, timeout=limit_s)


def _bounded(parse: ParseCalls | None) -> ParseCalls | None:
    """Return a parser that gives up on a text which its regular expressions would take hours for: some take
    the square of its length, and what a model writes can be what its caller wants."""
    if parse is None:
        return None
    known = getattr(parse, "__globals__", {})
    for name, value in list(known.items()):
        if type(value).__module__ == "_regex":  # of the package `regex`, which has timeouts
            known[name] = _BoundedPattern(value)

    def bounded(text: str, tools: list[dict[str, Any]] | None) -> Any:
        _parsing.search_count = 0
        return parse(text, tools)

    return bounded


def _special_tokens(wrapper: Any) -> list[str]:
    """Return the spellings that decoding hides when told to hide special tokens."""
    added = wrapper.added_tokens_decoder.values()
    return [*wrapper.all_special_tokens, *(token.content for token in added if token.special)]


def _contains(texts: Sequence[str | None], parts: Sequence[str]) -> bool:
    return any(part in text for text in texts if text for part in parts if part)
