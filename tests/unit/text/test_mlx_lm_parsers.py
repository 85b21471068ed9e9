"""The contract with mlx-lm's text state machine and its parsers of calls: this fails when they move."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil

import pytest
from icehouse_server.engine.runner import mlx_lm
from icehouse_server.text import mlx_lm_parsers
from icehouse_server.text.mlx_lm_parsers import read_reply_format
from mlx_lm import tool_parsers
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import _infer_tool_parser, load

from tests.fixtures.models.chat_templates import (
    ALTERNATING,
    HEADERS,
    REMEMBERING,
    THINKING,
    Family,
    write_family,
)

PARSERS = [module.name for module in pkgutil.iter_modules(tool_parsers.__path__)]


def test_the_functions_have_the_shape_we_call() -> None:
    assert list(inspect.signature(_infer_tool_parser).parameters) == ["tokenizer"]
    assert list(inspect.signature(make_text_state_machine).parameters) == ["tokenizer", "stop_words"]
    machine = TextStateMachine({"normal": [("<a>", "b")], "b": []})
    state, segments = TextStateMachine.split(machine.make_state("normal"), "x<a>y<")
    assert segments == [("normal", "x"), ("b", "y<")]
    assert TextStateMachine.flush(state)[1:] == ("", "b")


@pytest.mark.parametrize("name", PARSERS)
def test_every_parser_has_markers_and_takes_a_text_and_tools(name: str) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    assert isinstance(module.tool_call_start, str) and module.tool_call_start
    assert isinstance(module.tool_call_end, str)
    assert len(inspect.signature(module.parse_tool_call).parameters) == 2


@pytest.mark.parametrize(
    ("family", "parser"),
    [(THINKING, "json_tools"), (REMEMBERING, "json_tools"), (ALTERNATING, "mistral"), (HEADERS, "")],
)
def test_the_format_is_the_one_that_mlx_lm_finds(tmp_path, family: Family, parser: str) -> None:
    folder = write_family(tmp_path, family)
    ours = mlx_lm.read_tokenizer(folder, eos_token_ids=None, trust_remote_code=False)
    theirs = load(folder)
    assert (ours.tool_call_start, ours.tool_call_end) == (theirs.tool_call_start, theirs.tool_call_end)
    assert ours.tool_parser is theirs.tool_parser
    found = read_reply_format(ours)
    assert (found.parser_name, found.marks_calls) == (parser, bool(parser))
    assert found.marks_reasoning is theirs.has_thinking is (family in (THINKING, REMEMBERING))
    text = f"a{found.think_start}b{found.think_end}c{found.call_start}d{found.call_end}e"
    reference = make_text_state_machine(theirs)
    _, segments = TextStateMachine.split(reference.make_state("normal"), text)
    assert list(found.make_machine(True, "").split(text)) == segments


def test_without_tools_the_machine_leaves_calls_alone(tmp_path) -> None:
    folder = write_family(tmp_path, THINKING)
    found = read_reply_format(mlx_lm.read_tokenizer(folder, eos_token_ids=None, trust_remote_code=False))
    segments = found.make_machine(False, "").split("<think>a</think>b<tool_call>c</tool_call>")
    assert [text for state, text in segments if state == "normal"] == ["", "b<tool_call>c</tool_call>"]


def test_a_parser_named_by_the_folder_is_used(tmp_path) -> None:
    folder = write_family(tmp_path, HEADERS)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tool_parser_type": "pythonic"}))
    found = read_reply_format(mlx_lm.read_tokenizer(folder, eos_token_ids=None, trust_remote_code=False))
    assert (found.parser_name, found.call_start) == ("pythonic", "<|tool_call_start|>")


def test_a_text_that_a_parser_would_take_hours_for_is_given_up(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mistral's looks for a header from each of the letters to the last one."""
    monkeypatch.setattr(mlx_lm_parsers, "SEARCH_LIMIT_S", 0.02)
    ours = mlx_lm.read_tokenizer(
        write_family(tmp_path, ALTERNATING), eos_token_ids=None, trust_remote_code=False
    )
    parse = read_reply_format(ours).parse
    assert parse is not None
    with pytest.raises(TimeoutError):
        parse(f"{'a' * 8000}![ARGS]", [])
    long = json.dumps({"a": "x" * 200_000})
    for _ in range(2):
        assert parse(f"f[ARGS]{long}", []) == {"name": "f", "arguments": json.loads(long)}
