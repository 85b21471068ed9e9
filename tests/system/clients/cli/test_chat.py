"""`icehouse chat`: turns keep their tokens; commands, files, what goes wrong; pipe and terminal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from icehouse_client.cli.chat import Command, TurnReader, command_of
from icehouse_server.domain.events import Delta, Event
from icehouse_server.domain.request import GenerationRequest
from typer.testing import Result

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import MODEL_INFO, finished, hanging, overloaded, started
from tests.fixtures.terminal import invoke
from tests.unit.rpc.conftest import RunningServer, running

ROOMY = dataclasses.replace(MODEL_INFO, context_token_limit=4096)


def greeting(request: GenerationRequest) -> Iterable[Event]:
    """Script: two tokens, a different answer to a longer prompt."""
    yield started(request)
    yield Delta(f"answer to {len(request.prompt_token_ids)} ", (65, 66))
    yield finished(request, output_token_count=2)


@pytest.fixture
async def served() -> AsyncIterator[RunningServer]:
    async with running(info=ROOMY) as started_server:
        started_server.engine.script = greeting
        yield started_server


async def chat(served: RunningServer, text: str, *options: str) -> Result:
    return await invoke("chat", "--address", served.server.address, *options, input=text)


async def test_each_turn_sends_the_answers_before_it_with_their_tokens(served: RunningServer) -> None:
    result = await chat(served, "Hi\nMore\n", "--system", "Be brief.", "--temperature", "0.5")
    assert result.exit_code == 0, result.output
    first, second = served.engine.submitted
    assert (
        result.stdout
        == f"answer to {len(first.prompt_token_ids)} \nanswer to {len(second.prompt_token_ids)} \n"
    )
    assert "3 cached (2 from RAM, 1 from SSD)" in result.stderr
    turns = [(m.role, m.content, m.token_ids) for m in served.tokenizer.conversations[1].messages]
    assert [turn[0] for turn in turns] == ["system", "user", "assistant", "user"]
    assert (turns[0][1], turns[2][2], turns[3][1]) == ("Be brief.", (65, 66), "More")
    assert first.sampling.temperature == 0.5 and not served.tokenizer.conversations[0].tools
    assert first.session_id and first.session_id == second.session_id


async def test_a_saved_conversation_goes_on(served: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    await chat(served, "Hi\n", "--save", str(file), "--system", "Be brief.")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]
    loaded = await chat(served, "More\n", "--load", str(file))
    also = await chat(served, f"/load {file}\nMore\n/save {tmp_path / 'two'}\n")
    assert (loaded.exit_code, also.exit_code) == (0, 0), loaded.output + also.output
    first, second, third = served.tokenizer.conversations
    assert [m.content for m in second.messages] == [
        *(m.content for m in first.messages),
        second.messages[2].content,
        "More",
    ]
    assert second.messages[2].token_ids == (65, 66)
    assert third.messages == second.messages
    sessions = {request.session_id for request in served.engine.submitted}
    assert len(sessions) == 1 and json.loads((tmp_path / "two").read_text())["session_id"] in sessions


async def test_commands_change_the_conversation(served: RunningServer) -> None:
    text = 'one\n/undo\ntwo\n/clear\nthree\n/system Be kind.\n"""\nfour\nlines\n"""\n/help\n/exit\nfive\n'
    result = await chat(served, text)
    assert result.exit_code == 0, result.output
    told = [[m.content for m in c.messages if m.role != "assistant"] for c in served.tokenizer.conversations]
    assert told == [["one"], ["two"], ["three"], ["Be kind.", "three", "four\nlines"]]
    assert "/save FILE" in result.stderr and "/save" not in result.stdout


async def test_json_is_a_line_for_each_answer(served: RunningServer) -> None:
    result = await chat(served, "Hi\nMore\n", "--json")
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["text"] == "answer to 8 " and first["usage"]["cached_tokens"] == 3
    assert second["finish_reason"] == "LENGTH" and result.stderr == ""


@pytest.mark.parametrize(
    ("text", "options", "code", "words"),
    [
        ("/nothing\n", (), 2, "there is no /nothing; /help lists"),
        ("/save\n", (), 2, "/save needs a file name"),
        ("/save /nowhere/talk\n", (), 1, "/nowhere/talk cannot be written (No such file or directory)"),
        ("/load /nowhere/talk\n", (), 2, "/nowhere/talk cannot be read (No such file or directory)"),
        ("x" * 5000 + "\n", (), 1, "PROMPT_TOO_LONG /undo removes the last turn"),
        ("Hi\n", ("--model", "other"), 1, "NOT_FOUND"),
    ],
    ids=["unknown", "no name", "no folder", "no file", "too long", "model"],
)
async def test_what_goes_wrong_in_a_pipe_is_a_line_and_an_exit_code(
    served: RunningServer, text: str, options: tuple[str, ...], code: int, words: str
) -> None:
    result = await chat(served, text + "Never sent\n", *options)
    assert result.exit_code == code and result.stderr.count("icehouse:") == 1, result.output
    assert served.engine.submitted == [] and result.stdout == ""
    if "TOO_LONG" in words:
        assert (
            "the prompt has 5006 tokens" in result.stderr and "; /undo removes the last turn" in result.stderr
        )
    else:
        assert words in result.stderr


async def test_a_refusal_and_a_server_that_is_not_there(served: RunningServer) -> None:
    served.engine.refusal = overloaded()
    refused = await chat(served, "Hi\n")
    nobody = await invoke("chat", "--address", "127.0.0.1:1", input="Hi\n")
    assert refused.exit_code == 1 and "RESOURCE_EXHAUSTED: 8 requests wait, limit 8" in refused.stderr
    assert nobody.exit_code == 1 and "no server answers at 127.0.0.1:1; start one" in nobody.stderr
    for result in (refused, nobody):
        assert "Traceback" not in result.output


PROMPT = "> "


_COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from icehouse_client.cli.main import main
main()
"""
"""Where the tests run in the background of a shell, Ctrl-C is ignored from the start."""


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, address: str) -> None:
        self.shown = ""
        self._seen = 0
        self._descriptor, theirs = pty.openpty()
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environ |= {"TERM": "dumb", "COLUMNS": "100", "NO_COLOR": "1"}
        command = [sys.executable, "-c", _COMMAND, "chat", "--address", address]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
        os.close(theirs)

    def type(self, text: bytes) -> None:
        """Write as a keyboard does."""
        os.write(self._descriptor, text)

    def wait_for(self, text: str) -> None:
        """Return when it shows a text that it has not shown before, and then its prompt."""
        for wanted in (text, PROMPT):
            while (place := self.shown.find(wanted, self._seen)) < 0:
                assert self._read(), f"{wanted!r} does not come: {self.shown}"
            self._seen = place + len(wanted)

    def end(self) -> int:
        """Return its exit code."""
        while self._read():
            pass
        return self.process.wait(BOUND_S)

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        os.close(self._descriptor)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], BOUND_S)
        try:
            more = os.read(self._descriptor, 4096).decode() if ready else ""
        except OSError:
            # So Linux says that nobody has the terminal open any more.
            more = ""
        self.shown += more
        return bool(more)


async def test_on_a_terminal_a_mistake_ends_nothing(served: RunningServer) -> None:
    def talk() -> tuple[int, str]:
        with contextlib.closing(Terminal(served.server.address)) as terminal:
            terminal.wait_for("Ctrl-D ends")
            terminal.type(b"/nothing\n")
            terminal.wait_for("there is no /nothing")
            terminal.type(b"Hi\n")
            terminal.wait_for("3 cached (2 from RAM, 1 from SSD)")
            terminal.type(b"More\n")
            terminal.wait_for("3 cached")
            # Up brings the last line back.
            terminal.type(b"\x1b[A!\n")
            terminal.wait_for("3 cached")
            terminal.type(b"\x04")
            return terminal.end(), terminal.shown

    code, shown = await asyncio.to_thread(talk)
    assert code == 0, shown
    assert "tiny, 4,096 tokens of context" in shown
    for request in served.engine.submitted:
        assert f"answer to {len(request.prompt_token_ids)}" in shown
    said = [m.content for m in served.tokenizer.conversations[-1].messages if m.role == "user"]
    assert said == ["Hi", "More", "More!"]


async def test_ctrl_c_ends_an_answer_and_not_the_chat(served: RunningServer) -> None:
    def talk() -> tuple[int, str]:
        with contextlib.closing(Terminal(served.server.address)) as terminal:
            terminal.wait_for("Ctrl-D ends")
            terminal.type(b"Hi\n")
            while "hello" not in terminal.shown:
                assert terminal._read(), terminal.shown
            os.killpg(terminal.process.pid, signal.SIGINT)
            terminal.wait_for("interrupted; the turn is not kept")
            served.engine.script = greeting
            terminal.type(b"Again\n")
            terminal.wait_for("3 cached")
            terminal.type(b"/exit\n")
            return terminal.end(), terminal.shown

    served.engine.script = hanging
    code, shown = await asyncio.to_thread(talk)
    assert code == 0, shown
    assert [m.content for m in served.tokenizer.conversations[-1].messages] == ["Again"]
    assert await served.cancelled()


def turns(text: str) -> list[object]:
    return list(TurnReader(io.StringIO(text), is_terminal=False))


def test_each_line_is_a_turn_and_empty_ones_are_none() -> None:
    assert turns("one\n\n  \n two \nthree") == ["one", " two ", "three"]


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ('"""\none\n\n/two\n"""\n', "one\n\n/two"),
        ('"""one\ntwo"""\n', "one\ntwo"),
        ('"""/etc is a folder"""\n', "/etc is a folder"),
        ('"""\nthe input ends', "the input ends"),
    ],
)
def test_triple_quotes_hold_a_turn_of_several_lines(text: str, turn: str) -> None:
    assert turns(text) == [turn]


def test_what_follows_the_quotes_is_another_turn() -> None:
    assert turns('"""\none\n"""\ntwo\n') == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/save  a b.json ", Command("save", "a b.json", "save")),
        ("/EXIT", Command("exit", "", "EXIT")),
        ("/bye", Command("exit", "", "bye")),
        ("/?", Command("help", "", "?")),
        ("/etc/passwd what is it", Command(None, "what is it", "etc/passwd")),
    ],
)
def test_a_slash_begins_a_command(line: str, command: Command) -> None:
    assert command_of(line) == command
