"""`make bench CASE=speculation`: decode throughput with speculation against without, as ratios of one run.

One server stays loaded. In each round the same clients ask for the same texts plainly and with speculation;
the order turns from round to round, and a first round is thrown away. Two kinds of text: one quotes its
prompt (a paragraph that the prompt begins to say again), the other is drawn freely at temperature 1, where
guesses mostly fail. The outputs of both sides are compared token by token. The prefix cache is off.

`--draft-model NAME` lets that model guess instead of prompt lookup; `--draft-model same` takes the served
model itself, which guesses always right and shows what drafting costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import speculation_pb2

from bench.grpc_clients import Client, text_request
from bench.model_folder import model_path
from bench.replies import measure
from bench.report import OUT, Spread, console, ratios, setting, show_table, spread_of, write_json
from bench.server_process import ServerProcess

SIDES = ("plain", "speculating")
PARAGRAPH = (
    "The house stands by the lake. In winter men cut the ice with long saws, pull the blocks over the snow "
    "with horses, and pack them in straw between thick walls, where they keep until late summer. "
)
TEXTS = {
    "quoting": f"{PARAGRAPH}\n\nOnce more: {PARAGRAPH}\n\nOnce more: The house stands by",
    "free": "In the spring of that year the engineer",
}


@dataclasses.dataclass(slots=True)
class Rates:
    """Decode tokens per second of each side, round by round, and how many guesses were right."""

    plain: list[float | None] = dataclasses.field(default_factory=list)
    speculating: list[float | None] = dataclasses.field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    output_tokens: int = 0
    """Output of the side that speculates."""

    def ratio(self) -> Spread:
        """Return speculating / plain over the rounds."""
        return ratios(self.speculating, self.plain)

    def accepted(self) -> str:
        """Return the share of guesses that were right, and of the output that they made."""
        share = self.accepted_tokens / max(1, self.draft_tokens)
        return f"{share:.0%} of guesses, {self.accepted_tokens / max(1, self.output_tokens):.0%} of output"


def main() -> None:
    """Measure, print the tables, write bench/out/speculation.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=speculation", description=__doc__)
    parser.add_argument("--model", default="demo-gemma", help="random, or as for icehouse serve")
    parser.add_argument("--draft-model", default="", help="guess with this model; `same` for the served one")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--draft-tokens", type=int, default=0, help="guesses a step; 0 for the server's default"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per reply")
    parser.add_argument("--serve-flags", default="", help="more flags for icehouse serve, in one string")
    arguments = parser.parse_args()
    began = time.monotonic()
    rates = asyncio.run(_measure(arguments))
    _report(rates, arguments, duration_s=time.monotonic() - began)


async def _measure(arguments: argparse.Namespace) -> dict[str, Rates]:
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "speculation.log"
    log_file.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = model_path(arguments.model, scratch)
        draft = str(path) if arguments.draft_model == "same" else arguments.draft_model
        console.print(f"starting the server with {path.name}")
        server = stack.enter_context(
            ServerProcess(
                model=str(path),
                cache_directory=scratch / "blocks",
                log_file=log_file,
                flags=[*(["--draft-model", draft] if draft else []), *arguments.serve_flags.split()],
            )
        )
        clients = [Client(server.address) for _ in range(max(arguments.clients))]
        await asyncio.gather(*(client.ready() for client in clients))
        try:
            return await _rounds(clients, arguments)
        finally:
            await asyncio.gather(*(client.close() for client in clients))


async def _rounds(clients: Sequence[Client], arguments: argparse.Namespace) -> dict[str, Rates]:
    rates = {f"{kind}, {count} clients": Rates() for kind in TEXTS for count in arguments.clients}
    for round_index in range(arguments.rounds + 1):
        sides = SIDES if round_index % 2 else SIDES[::-1]
        for kind in TEXTS:
            for count in arguments.clients:
                told = [
                    await _side(
                        clients[:count], arguments, kind, Rates() if not round_index else rates[name], s
                    )
                    for name in [f"{kind}, {count} clients"]
                    for s in sides
                ]
                assert told[0] == told[1], f"{kind}: speculation changed the output"
        console.print(f"round {round_index} of {arguments.rounds} done" if round_index else "warm-up done")
    return rates


async def _side(
    clients: Sequence[Client], arguments: argparse.Namespace, kind: str, rates: Rates, side: str
) -> list[tuple[int, ...]]:
    """Run one side once, note its rate, and return each client's tokens."""
    requests = [
        _request(kind, index, arguments, speculates=side == "speculating") for index in range(len(clients))
    ]
    seen = await asyncio.gather(*(c.stream(r) for c, r in zip(clients, requests, strict=True)))
    replies = [reply for reply, _, _ in seen]
    rate = measure(replies).decode_tokens_per_s
    if side == "plain":
        rates.plain.append(rate)
    else:
        rates.speculating.append(rate)
        rates.draft_tokens += sum(finished.usage.draft_tokens for _, _, finished in seen)
        rates.accepted_tokens += sum(finished.usage.accepted_draft_tokens for _, _, finished in seen)
        rates.output_tokens += sum(len(reply.token_ids) for reply in replies)
    return [reply.token_ids for reply in replies]


def _request(
    kind: str, index: int, arguments: argparse.Namespace, *, speculates: bool
) -> messages.GenerateRequest:
    request = text_request(TEXTS[kind], max_output_tokens=arguments.tokens)
    request.sampling.ignore_end_tokens = True
    if kind == "free":
        request.sampling.temperature = 1.0
        request.sampling.seed = index + 1
    if speculates:
        drafter = (
            {"draft_model": speculation_pb2.DraftModel()}
            if arguments.draft_model
            else {"prompt_lookup": speculation_pb2.PromptLookup()}
        )
        request.speculation.CopyFrom(
            speculation_pb2.Speculation(max_draft_tokens=arguments.draft_tokens, **drafter)
        )
    return request


def _report(rates: dict[str, Rates], arguments: argparse.Namespace, *, duration_s: float) -> None:
    show_table(
        "Decode with speculation / without: median (min to max) of the ratio in each round",
        ("text", "ratio", "accepted", "plain tokens/s here"),
        [
            (name, found.ratio().text(2), found.accepted(), spread_of(found.plain).number(1))
            for name, found in rates.items()
        ],
    )
    content = {
        "setting": setting(),
        "arguments": vars(arguments),
        "duration_s": duration_s,
        "rates": {name: dataclasses.asdict(found) for name, found in rates.items()},
        "ratios": {name: found.ratio() for name, found in rates.items()},
    }
    console.print(f"{write_json('speculation', content)}; {duration_s:.0f} s")


if __name__ == "__main__":
    main()
