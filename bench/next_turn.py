"""`make bench CASE=nextturn`: a user's second question where the template rewrites what came before.

An agent's loop with reasoning, its answer, and then a question, in turn with a server that computes ahead
while idle and with one that does not, for the model's template and others (--templates: JSON, name to text).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from icehouse_client import Client
from icehouse_client.formats import choice

from bench.model_folder import model_path
from bench.report import OUT, show_table
from bench.server_process import ServerProcess

_WORDS = ("rain", "in", "the", "west", "comes", "over", "the", "hills", "and", "turns", "to", "snow", "there")
_ANSWER = "It will rain in the valley, so take the lower road."
_WAIT_S = 20.0
"""Longest idle time before the second question for a server that computes ahead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Second:
    """Measurement of the second question."""

    prompt_token_count: int
    computed_token_count: int
    ttft_s: float


def main() -> None:
    """Print the table, and write bench/out/next_turn.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=nextturn", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--templates", type=Path, help="a JSON file, name to text; else the model's own")
    parser.add_argument("--names", nargs="*", default=[], help="of the templates in it")
    parser.add_argument("--steps", type=int, default=8, help="calls of tools before the answer")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    texts = json.loads(arguments.templates.read_text(encoding="utf-8")) if arguments.templates else {}
    found: dict[str, dict[str, list[Second]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = model_path(arguments.model, Path(scratch))
        for name in arguments.names or texts or ["own"]:
            folder = _with_template(model, texts[name], Path(scratch)) if name in texts else model
            found[name] = _compare(folder, steps=arguments.steps, rounds=arguments.rounds)
            _report(name, found[name])
    OUT.mkdir(parents=True, exist_ok=True)
    plain = {
        name: {way: [dataclasses.asdict(s) for s in seconds] for way, seconds in ways.items()}
        for name, ways in found.items()
    }
    (OUT / "next_turn.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")


def _with_template(model: Path, text: str, scratch: Path) -> Path:
    """Return a copy of a model with another template."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    for file in model.iterdir():
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return folder


def _compare(folder: Path, *, steps: int, rounds: int) -> dict[str, list[Second]]:
    """Hold the same conversation, in turn, with a server that computes ahead and with one that does not."""
    seconds: dict[str, list[Second]] = {"without": [], "ahead": []}
    with _server(folder, ()) as ahead, _server(folder, ("--prefetch-token-limit", "0")) as without:
        for number in range(rounds + 1):
            for way, client in (("without", without), ("ahead", ahead)):
                second = _talk(client, steps=steps, number=number, rests=way == "ahead")
                seconds[way] += [second] if number else []  # the first one warms the server up
    return seconds


@contextlib.contextmanager
def _server(folder: Path, flags: tuple[str, ...]) -> Iterator[Client]:
    with tempfile.TemporaryDirectory() as scratch:
        directory, log = Path(scratch) / "cache", Path(scratch) / "log"
        server = ServerProcess(model=str(folder), cache_directory=directory, log_file=log, flags=flags)
        with server, Client(server.address) as client:
            yield client


def _talk(client: Client, *, steps: int, number: int, rests: bool) -> Second:
    """Ask, leave the server idle if it computes ahead, and ask again."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Which road, on day {number}?"}]
    for step in range(steps):
        call = {"id": f"call{step:05}", "name": "look", "arguments_json": json.dumps({"place": step})}
        thought = " ".join(_WORDS * 5) + f" {number}.{step}"
        messages += [
            {"role": "assistant", "content": "", "reasoning": thought, "tool_calls": [call]},
            {"role": "tool", "content": " ".join(_WORDS * 2) + f" {step}", "tool_call_id": call["id"]},
        ]
    how: dict[str, Any] = {"session_id": f"talk-{number}", "temperature": 0.0, "max_output_tokens": 256}
    before = _computed_ahead(client)
    answer = client.chat(messages, response_format=choice(_ANSWER), **how)
    until = time.monotonic() + _WAIT_S
    while rests and time.monotonic() < until and _computed_ahead(client) == before:
        time.sleep(0.05)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And back?"}]
    usage = client.chat(messages, **{**how, "max_output_tokens": 1}).usage
    return Second(usage.prompt_tokens, usage.prompt_tokens - usage.cached_tokens, usage.ttft_s)


def _computed_ahead(client: Client) -> int:
    return client.cache_stats().cache.prefetch.done_total


def _report(name: str, ways: dict[str, list[Second]]) -> None:
    rows = []
    for way, seconds in ways.items():
        computed = statistics.median(s.computed_token_count for s in seconds)
        first_ms = [1e3 * s.ttft_s for s in seconds]
        spread = f"{statistics.median(first_ms):.0f} ({min(first_ms):.0f} to {max(first_ms):.0f})"
        rows.append((way, str(seconds[-1].prompt_token_count), f"{computed:.0f}", spread))
    show_table(f"the second question: {name}", ("", "prompt tokens", "computed", "first token, ms"), rows)


if __name__ == "__main__":
    main()
