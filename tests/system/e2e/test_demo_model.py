"""The real demo model through the real command line: one server process, asked over its socket."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_server.cli.demo import free_port, running_server
from icehouse_server.demo.models import SMOLLM2
from icehouse_server.rpc.client.generate import CallFailed, Connection, Prompt, Summary

from tests.fixtures.demo_models import demo_model_dir

pytestmark = pytest.mark.timeout(400)

CAPITAL = Prompt(text="The capital of France is", max_output_tokens=12)


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A server process and a connection to it."""

    address: str
    scratch: Path
    connection: Connection

    def ask(self, prompt: Prompt) -> tuple[str, Summary]:
        pieces: list[str] = []
        summary = self.connection.stream(prompt, on_text=pieces.append, timeout_s=120)
        return "".join(pieces), summary


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Leaving it stops the server with SIGTERM and fails unless that ends with exit code 0."""
    demo_model_dir(SMOLLM2)
    address = f"127.0.0.1:{free_port()}"
    scratch: Path = tmp_path_factory.mktemp("server")
    with running_server(address=address, scratch=scratch) as server, Connection(address) as connection:
        assert connection.wait_until_serving(is_alive=lambda: server.poll() is None), "the server ended"
        yield Running(address, scratch, connection)


def icehouse(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "icehouse_server.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_continues_in_english_and_counts(running: Running) -> None:
    text, summary = running.ask(CAPITAL)
    assert "capital" in text or "Paris" in text, text
    assert text.startswith(" "), "the space between prompt and continuation is the model's"
    assert (summary.prompt_token_count, summary.output_token_count) == (5, 12)
    assert summary.finish_reason == "length"
    assert summary.ttft_s > 0


def test_a_seed_draws_the_same_text_again(running: Running) -> None:
    prompt = Prompt(text="Once upon a time", max_output_tokens=8, temperature=1.0, seed=7)
    assert running.ask(prompt)[0] == running.ask(prompt)[0]


def test_a_question_gets_the_right_answer_and_an_end(running: Running) -> None:
    question = Prompt(text="What is the capital of France?", is_chat=True, max_output_tokens=32)
    text, summary = running.ask(question)
    assert text == "The capital of France is Paris."
    assert summary.finish_reason == "stop_token"


def test_the_command_line_streams_to_standard_output(running: Running) -> None:
    done = icehouse("generate", CAPITAL.text, "--max-output-tokens", "12", "--address", running.address)
    assert done.returncode == 0
    assert done.stdout == running.ask(CAPITAL)[0] + "\n"
    assert "5 prompt tokens" in done.stderr


def test_a_refusal_reaches_the_user(running: Running) -> None:
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        running.ask(Prompt(text="a", temperature=-1.0))


def test_a_taken_port_ends_a_second_server_with_one_line(running: Running) -> None:
    port = running.address.rpartition(":")[2]
    done = icehouse("serve", "--model", "demo", "--port", port, "--log-level", "error", "--no-cache")
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and port in lines[0] and "--port" in lines[0]


def test_a_taken_cache_directory_ends_a_second_server_with_one_line(running: Running) -> None:
    blocks = str(running.scratch / "blocks")
    done = icehouse(
        "serve", "--model", "demo", "--port", "0", "--log-level", "error", "--cache-directory", blocks
    )
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and blocks in lines[0] and "process" in lines[0]


def test_a_broken_model_ends_the_server_with_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gemma3_text"}')
    done = icehouse("serve", "--model", str(folder), "--port", "0", "--log-level", "error", "--no-cache")
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and str(folder) in lines[0]
