"""`make fleet`: two workers and the gateway SMG in front of them, on loopback, shown at work.

Three conversations go to workers that keep them. Whichever worker then has two of them is killed; one of the
two goes on at the other worker. The killed one comes back, and the second of the two finds it again by the
blocks that it has on SSD. Everything is stopped at the end, and on Ctrl-C; `--stay` serves until then.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import importlib.resources
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from icehouse_client.cli.console import complain, err, out
from icehouse_server.errors import IcehouseError, extra_command

from bench.fleet.chat import Answer, ChatFailed, chat
from bench.fleet.fleet import Fleet, WorkerProcess, until
from bench.fleet.gateway import missing_packages, worker_url
from bench.model_folder import model_path

_WORKER_COUNT = 2
_OUTPUT_TOKEN_COUNT = 24
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_INTERRUPTED = 130

_QUESTIONS = (
    ("Who built the icehouse?", "Did the masons like it?", "What is written above the door?"),
    ("What is between the two walls?", "How many doors are there?", "Who sits in the passage?"),
    ("When did the village go out on the pond?", "How long is a block?", "What keeps?"),
)
"""Of three pages of a story, three turns each."""


@dataclasses.dataclass(slots=True)
class Conversation:
    """One user's: what was said, and who answered."""

    number: int
    page: str
    questions: tuple[str, ...]
    said: list[dict[str, str]] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)

    def ask(self) -> list[dict[str, str]]:
        """Return all messages, with the next question as the last one."""
        if not self.said:
            self.said.append({"role": "system", "content": f"{self.page} Answer in one short sentence."})
        self.said.append({"role": "user", "content": self.questions[len(self.turns)]})
        return self.said


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One answer: which worker gave it, and what of its prompt that worker had, where."""

    worker: str
    answer: Answer
    ram_token_count: int
    ssd_token_count: int


def main() -> None:
    """Run the tour; exit code 1 where something was not as it should be."""
    parser = argparse.ArgumentParser(prog="make fleet", description=__doc__)
    parser.add_argument("--model", default="demo", help="a folder, or as for icehouse serve")
    parser.add_argument("--block-tokens", type=int, default=64, help="tokens of a block")
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C when all has been shown")
    arguments = parser.parse_args()
    if missing := missing_packages():
        complain(
            f"make fleet needs {' and '.join(missing)}, the gateway's: say {extra_command('dev')}, or "
            "`pip install smg smg-grpc-proto` (there is no build of smg for Intel Macs)"
        )
        sys.exit(1)
    try:
        wrong = asyncio.run(_run(arguments))
    except asyncio.CancelledError:
        err.print("[dim]stopped[/]")
        sys.exit(_EXIT_INTERRUPTED)
    except (ChatFailed, IcehouseError, OSError, RuntimeError, TimeoutError) as error:
        complain(str(error))
        sys.exit(1)
    for each in wrong:
        complain(each)
    sys.exit(1 if wrong else 0)


async def _run(arguments: argparse.Namespace) -> list[str]:
    """Show all of it; return what was not as it should be."""
    with tempfile.TemporaryDirectory(prefix="icehouse-fleet-") as name:
        model = model_path(arguments.model, Path(name))
        _cancel_on_signals()
        fleet = Fleet(
            model=model,
            folder=Path(name),
            worker_count=_WORKER_COUNT,
            flags=_worker_flags(arguments.block_tokens),
            gateway_options=("--policy", "cache_aware"),
        )
        err.print(f"[dim]starting {_WORKER_COUNT} workers for {model.name} and the gateway[/]")
        async with fleet:
            _show_addresses(fleet)
            wrong = await Tour(fleet).show()
            if arguments.stay:
                err.print("[dim]serving until Ctrl-C[/]")
                await asyncio.Event().wait()
            err.print("[dim]stopping gateway and workers[/]")
        err.print("[dim]gateway and workers have stopped[/]")
    return wrong


def _worker_flags(block_token_count: int) -> tuple[str, ...]:
    """Return flags under which a killed worker has on SSD what its idle disk took, and uses it."""
    return (
        *("--block-token-count", str(block_token_count), "--min-prefix-token-count", "0"),
        *("--spill-policy", "write_behind", "--no-restore-or-recompute"),
    )


def _cancel_on_signals() -> None:
    """Let Ctrl-C and other orders to end take effect where nothing is half started, and once only."""
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, lambda: None)
        err.print("\n[dim]stopping gateway and workers[/]")
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)


def _show_addresses(fleet: Fleet) -> None:
    out.print(f"OpenAI base URL:     [bold]{fleet.gateway.url}/v1[/]  (model {fleet.model_id})")
    out.print(f"Anthropic base URL:  [bold]{fleet.gateway.url}[/]")
    out.print(f"gateway:             process {fleet.gateway.pid}")
    for worker in fleet.workers:
        out.print(f"worker {worker.name}:            process {worker.pid}, {worker.address}")


class Tour:
    """What is shown, step by step. Only one request is under way at any moment."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._accepted = {worker.name: 0 for worker in fleet.workers}

    async def show(self) -> list[str]:
        """Show everything; return what was not as it should be."""
        _show_step("Three conversations, two turns each")
        conversations = open_conversations()
        for conversation in conversations:
            for _ in range(2):
                await self._turn(conversation)
        victim, going_on, returning = chosen(conversations)
        worker = next(worker for worker in self._fleet.workers if worker.name == victim)
        await until(lambda: _is_written(worker), "the blocks in use do not reach the SSD")
        subscription_count = self._subscriptions(worker)
        worker.kill()
        _show_step(
            f"Worker {victim} was killed (kill -9 {worker.pid}); conversation {going_on.number} goes on"
        )
        await self._turn(going_on)
        await until(
            lambda: worker_url(worker.port) not in self._fleet.gateway.healthy_urls(),
            "the gateway does not notice that a worker is gone",
        )
        serving_s = await self._fleet.restart(worker)
        block_count = whole_ssd_blocks(worker)
        await until(
            lambda: (
                self._subscriptions(worker) > subscription_count
                and self._indexed(worker) >= block_count
                and worker_url(worker.port) in self._fleet.gateway.healthy_urls()
            ),
            "the gateway does not take the worker back",
        )
        self._accepted[victim] = 0
        _show_step(
            f"Worker {victim} is back after {serving_s:.1f} s (process {worker.pid}) and has told the "
            f"gateway of {block_count} blocks on its SSD; conversation {returning.number} goes on"
        )
        await self._turn(returning)
        return complaints(conversations, victim=victim, going_on=going_on, returning=returning)

    async def _turn(self, conversation: Conversation) -> None:
        """Ask the next question, show the answer, and wait until the gateway knows of its blocks."""
        before = {worker.name: worker.stats().cache.lookups for worker in self._alive()}
        answer = await chat(
            self._fleet.gateway.url,
            model=self._fleet.model_id,
            messages=conversation.ask(),
            max_output_tokens=_OUTPUT_TOKEN_COUNT,
        )
        worker = self._taker()
        after = worker.stats().cache.lookups
        conversation.said.append({"role": "assistant", "content": answer.text})
        conversation.turns.append(
            Turn(
                worker.name,
                answer,
                ram_token_count=after.ram_token_total - before[worker.name].ram_token_total,
                ssd_token_count=after.ssd_token_total - before[worker.name].ssd_token_total,
            )
        )
        _show_turn(conversation)
        await until(
            lambda: self._indexed(worker) >= whole_ram_blocks(worker), "the gateway is not told of the blocks"
        )

    def _taker(self) -> WorkerProcess:
        """Return the worker that took the latest request."""
        for worker in self._alive():
            accepted = worker.stats().engine.accepted_total
            if accepted > self._accepted[worker.name]:
                self._accepted[worker.name] = accepted
                return worker
        raise RuntimeError("no worker took the request that was answered")

    def _alive(self) -> list[WorkerProcess]:
        return [worker for worker in self._fleet.workers if worker.is_alive]

    def _indexed(self, worker: WorkerProcess) -> float:
        return self._fleet.gateway.metric("smg_kv_index_blocks", worker_port=worker.port)

    def _subscriptions(self, worker: WorkerProcess) -> float:
        return self._fleet.gateway.metric("smg_kv_event_subscriptions_total", worker_port=worker.port)


def open_conversations() -> list[Conversation]:
    """Return three that share no beginning of a block's length: each is about a page of its own."""
    story = (
        importlib.resources.files("icehouse_server.demo").joinpath("story.txt").read_text(encoding="utf-8")
    )
    pages = story.split("\n\n")
    return [
        Conversation(number, pages[number - 1], questions)
        for number, questions in enumerate(_QUESTIONS, start=1)
    ]


def chosen(conversations: Sequence[Conversation]) -> tuple[str, Conversation, Conversation]:
    """Return a worker that has two conversations, and these: of three and two workers there is one."""
    counts = collections.Counter(each.turns[-1].worker for each in conversations)
    victim, _ = counts.most_common(1)[0]
    going_on, returning, *_ = [each for each in conversations if each.turns[-1].worker == victim]
    return victim, going_on, returning


def complaints(
    conversations: Sequence[Conversation], *, victim: str, going_on: Conversation, returning: Conversation
) -> list[str]:
    """Return what was not as it should be, as sentences; nothing when all was."""
    wrong = []
    for each in conversations:
        first, second = each.turns[:2]
        if first.worker != second.worker:
            wrong.append(f"conversation {each.number} left worker {first.worker}, which had its blocks")
        if second.ram_token_count + second.ssd_token_count < first.answer.prompt_token_count // 2:
            wrong.append(f"conversation {each.number} was computed again on its second turn")
    if going_on.turns[-1].worker == victim or len(going_on.turns) != 3:
        wrong.append(f"conversation {going_on.number} did not go on without worker {victim}")
    last = returning.turns[-1]
    if last.worker != victim:
        wrong.append(
            f"conversation {returning.number} did not come back to worker {victim}, which has its blocks"
        )
    elif not last.ssd_token_count:
        wrong.append(f"worker {victim} came back without what it had on SSD")
    return wrong


def whole_ram_blocks(worker: WorkerProcess) -> int:
    """Return how many full blocks a worker has in RAM; tails are not told to gateways."""
    ram = worker.stats().cache.ram
    return ram.block_count - ram.tail_count


def whole_ssd_blocks(worker: WorkerProcess) -> int:
    """Return how many full blocks a worker has on SSD."""
    ssd = worker.stats().cache.ssd
    return ssd.block_count - ssd.tail_count


def _is_written(worker: WorkerProcess) -> bool:
    spill = worker.stats().cache.spill
    return spill.persisted_block_total > 0 and not spill.behind_waiting_count


def _show_step(text: str) -> None:
    out.print(f"\n[bold]{text}[/]")


def _show_turn(conversation: Conversation) -> None:
    turn, answer = conversation.turns[-1], conversation.turns[-1].answer
    tiers = [(turn.ram_token_count, "RAM"), (turn.ssd_token_count, "SSD")]
    reused = " + ".join(f"{count:,} {tier}" for count, tier in tiers if count) or "0"
    out.print(
        f"  {conversation.number}, turn {len(conversation.turns)}: worker {turn.worker}, "
        f"{reused} of {answer.prompt_token_count:,} tokens reused, first token {answer.ttft_s * 1000:,.0f} ms"
    )
    text = " ".join(answer.text.split())
    out.print(f"     {conversation.questions[len(conversation.turns) - 1]} {text}", style="dim", markup=False)


if __name__ == "__main__":
    main()
