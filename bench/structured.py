"""`make bench CASE=structured`: decode throughput with a response format against without, as ratios.

One server stays loaded. In each round the same clients ask for free text, for JSON of a schema, and half
of them for each; the order rotates from round to round, and a first round is discarded. Every reply has the
same number of tokens: end tokens are ignored and the schema wants more than fits. The prefix cache is off.
Only the stretch in which every client decodes counts.

The default is Gemma 3 270M, because its vocabulary of 262,144 tokens is as large as any, and the cost of a
mask grows with the vocabulary. `--model random` has 320 tokens and short steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import response_format_pb2

from bench.grpc_clients import Client, stream_together, token_request
from bench.model_folder import model_path
from bench.prompts import SHORT_PROMPT_TOKEN_COUNT, short_prompts
from bench.replies import measure
from bench.report import (
    OUT,
    Verdict,
    console,
    ratios,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)
from bench.server_process import ServerProcess

RATIO_TARGET = 0.90
SIDES = ("free", "schema", "half")
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
            "kind": {"enum": ["person", "company", "place"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}


def main() -> None:
    """Measure, print the tables, write bench/out/structured.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=structured", description=__doc__)
    parser.add_argument("--model", default="demo-gemma", help="random, or as for icehouse serve")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--tokens", type=int, default=56, help="output tokens per reply")
    parser.add_argument("--serve-flags", default="", help="more flags for icehouse serve, in one string")
    arguments = parser.parse_args()
    began = time.monotonic()
    rates = asyncio.run(_measure(arguments))
    _report(rates, arguments, duration_s=time.monotonic() - began)


async def _measure(arguments: argparse.Namespace) -> dict[str, list[float | None]]:
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "structured.log"
    log_file.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = model_path(arguments.model, scratch)
        console.print(f"starting the server with {path.name}")
        server = stack.enter_context(
            ServerProcess(
                model=str(path),
                cache_directory=scratch / "blocks",
                log_file=log_file,
                flags=arguments.serve_flags.split(),
            )
        )
        clients = [Client(server.address) for _ in range(arguments.clients)]
        await asyncio.gather(*(client.ready() for client in clients))
        try:
            return await _rounds(clients, arguments)
        finally:
            await asyncio.gather(*(client.close() for client in clients))


async def _rounds(clients: Sequence[Client], arguments: argparse.Namespace) -> dict[str, list[float | None]]:
    texts = short_prompts(len(clients), seed=1)
    prompts = [(await clients[0].tokenize(text))[:SHORT_PROMPT_TOKEN_COUNT] for text in texts]
    rates: dict[str, list[float | None]] = {side: [] for side in SIDES}
    for round_index in range(arguments.rounds + 1):
        for turn in range(len(SIDES)):
            side = SIDES[(round_index + turn) % len(SIDES)]
            requests = [
                _request(prompt, max_output_tokens=arguments.tokens, has_form=_has_form(side, index))
                for index, prompt in enumerate(prompts)
            ]
            replies = await stream_together(clients, requests)
            counts = {len(reply.token_ids) for reply in replies}
            assert counts == {arguments.tokens}, f"replies of {side} have {counts} tokens"
            if round_index:
                rates[side].append(measure(replies).decode_tokens_per_s)
        console.print(f"round {round_index} of {arguments.rounds} done" if round_index else "warm-up done")
    return rates


def _has_form(side: str, index: int) -> bool:
    return side == "schema" or (side == "half" and index % 2 == 0)


def _request(prompt: Sequence[int], *, max_output_tokens: int, has_form: bool) -> messages.GenerateRequest:
    request = token_request(prompt, max_output_tokens=max_output_tokens)
    request.sampling.ignore_end_tokens = True
    if has_form:
        form = response_format_pb2.ResponseFormat(json_schema=json.dumps(SCHEMA), compact=True)
        request.response_format.CopyFrom(form)
    return request


def _report(
    rates: dict[str, list[float | None]], arguments: argparse.Namespace, *, duration_s: float
) -> None:
    compared = {side: ratios(rates[side], rates["free"]) for side in SIDES[1:]}
    show_table(
        "Decode with a response format / without: median (min to max) of the ratio in each round",
        ("clients", "all with a schema", "half with a schema"),
        [(str(arguments.clients), compared["schema"].text(3), compared["half"].text(3))],
    )
    show_table(
        "For orientation, this machine and moment only",
        ("side", "decode tokens/s"),
        [(side, spread_of(rates[side]).text(1)) for side in SIDES],
    )
    verdicts = [
        Verdict(f"decode, {arguments.clients} clients, {side}", compared[side], RATIO_TARGET, at_least=True)
        for side in SIDES[1:]
    ]
    show_verdicts(verdicts)
    content = {"setting": setting(), "arguments": vars(arguments), "duration_s": duration_s}
    path = write_json("structured", {**content, "rates": rates, "ratios": compared, "targets": verdicts})
    console.print(f"{path}; {duration_s:.0f} s")


if __name__ == "__main__":
    main()
