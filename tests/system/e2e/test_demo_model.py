"""The real demo model through the real command line: one server process, asked over its socket."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import pytest
from icehouse_client import Client, IcehouseClientError, Message, Options, Prompt, Reply
from icehouse_server.cli.local.child_server import serving
from icehouse_server.demo.models import SMOLLM2

from tests.fixtures.demo_models import demo_model_dir
from tests.fixtures.forked import run_forked

CAPITAL = "The capital of France is"


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A server process and a connection to it."""

    address: str
    scratch: Path
    client: Client

    def ask(self, prompt: Prompt, **options: Unpack[Options]) -> Reply:
        return self.client.generate(prompt, **options)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Leaving it stops the server with SIGTERM and fails unless that ends with exit code 0."""
    demo_model_dir(SMOLLM2)
    scratch: Path = tmp_path_factory.mktemp("server")
    with serving("starting a server", scratch=scratch, model=SMOLLM2.name) as (client, address):
        yield Running(address, scratch, client)


def icehouse(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "icehouse_server.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def refused(output: Path, *options: str) -> list[str]:
    """Serve in a process that has imported MLX already, and so cannot preload; return what it ends with."""
    command = ("serve", "--model", "demo", "--no-preload", "--log-level", "error", *options)
    program = f"import sys; from icehouse_server.cli import main; sys.argv[1:] = {command!r}; main.main()"
    assert run_forked(program, output) == 1
    return output.read_text().strip().splitlines()


def test_it_continues_in_english_and_counts(running: Running) -> None:
    reply = running.ask(CAPITAL, max_output_tokens=12)
    assert "capital" in reply.text or "Paris" in reply.text, reply.text
    assert reply.text.startswith(" "), "the space between prompt and continuation is the model's"
    assert (reply.usage.prompt_tokens, reply.usage.output_tokens) == (5, 12)
    assert reply.finish_reason == "LENGTH"
    assert reply.usage.ttft_s > 0


def test_a_seed_draws_the_same_text_again(running: Running) -> None:
    options: Options = {"max_output_tokens": 8, "temperature": 1.0, "seed": 7}
    first, second = (running.ask("Once upon a time", **options) for _ in range(2))
    assert first.text == second.text


def test_a_question_gets_the_right_answer_and_an_end(running: Running) -> None:
    question = Message(role="user", content="What is the capital of France?")
    reply = running.ask([question], max_output_tokens=32)
    assert reply.text == "The capital of France is Paris."
    assert reply.finish_reason == "STOP_TOKEN"


def test_the_command_line_streams_to_standard_output(running: Running) -> None:
    done = icehouse("generate", CAPITAL, "--max-output-tokens", "12", "--address", running.address)
    assert done.returncode == 0
    assert done.stdout == running.ask(CAPITAL, max_output_tokens=12).text + "\n"
    assert "5 prompt tokens" in done.stderr


def test_a_refusal_reaches_the_user(running: Running) -> None:
    with pytest.raises(IcehouseClientError, match="INVALID_ARGUMENT"):
        running.ask("a", temperature=-1.0)


def test_a_taken_port_ends_a_second_server_with_one_line(running: Running, tmp_path: Path) -> None:
    port = running.address.rpartition(":")[2]
    lines = refused(tmp_path / "output", "--port", port, "--no-cache")
    assert len(lines) == 1 and port in lines[0] and "--port" in lines[0]


def test_a_taken_cache_directory_ends_a_second_server_with_one_line(running: Running, tmp_path: Path) -> None:
    blocks = str(running.scratch / "blocks")
    lines = refused(tmp_path / "output", "--port", "0", "--cache-directory", blocks)
    assert len(lines) == 1 and blocks in lines[0] and "process" in lines[0]


def test_a_broken_model_ends_the_server_with_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gemma3_text"}')
    done = icehouse("serve", "--model", str(folder), "--port", "0", "--log-level", "error", "--no-cache")
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and str(folder) in lines[0]
