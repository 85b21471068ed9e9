"""`make bench-vision`: a conversation about one picture, cold, from RAM, and from SSD after a restart.

Beside mlx-vlm's own generation, which keeps nothing from one call to the next. Each round has a picture and
a question of its own: 256 image tokens and some 700 of text, of a random Qwen2.5-VL. Times to the first
token, as ratios of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2

from bench.cache_ttft import connected
from bench.grpc_clients import READ_WRITE, Client
from bench.mlx_vlm_process import MlxVlmProcess
from bench.prompts import text_of_tokens
from bench.report import (
    OUT,
    Spread,
    Verdict,
    console,
    ratios,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)
from bench.server_process import ROOT, ServerProcess, child_environment
from tests.fixtures.models.vision import FAMILIES, tiny_vision_dir

OUTPUT_TOKEN_COUNT = 8
TEXT_TOKEN_COUNT = 700
IMAGE_TOKEN_COUNT = 256
_PATCH = 14
_SIDE = 448
"""Pixels: 32 patches, of which two by two are a token."""
_ANSWER = "It is a boat, and somebody stands beside it."
_NEXT_QUESTION = "And what is behind it, on the left of the harbour?"


@dataclasses.dataclass(slots=True)
class PictureTimes:
    """One conversation, times in seconds; `*_tokens` is what the server said it reused."""

    question: str
    picture: bytes
    prompt_tokens: int = 0
    image_tokens: int = 0
    cold_s: float = 0.0
    ram_s: float = 0.0
    next_turn_s: float = 0.0
    ssd_s: float = 0.0
    peer_cold_s: float = 0.0
    peer_again_s: float = 0.0
    ram_tokens: int = 0
    ssd_tokens: int = 0
    replies: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    @property
    def replies_are_equal(self) -> bool:
        """Whether cold, RAM and SSD gave the same tokens."""
        return len(set(self.replies)) == 1


def main() -> None:
    """Measure, print the tables, write bench/out/vision.json."""
    parser = argparse.ArgumentParser(prog="make bench-vision", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make is not None:
        _write_model(arguments.make)
        return
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "vision.log"
    log_file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        rounds = arguments.rounds or (1 if arguments.quick else 5)
        _report(asyncio.run(_measure(Path(scratch), log_file, rounds)))
    console.print(f"{time.monotonic() - began:.0f} s in all")


def _write_model(parent: Path) -> None:
    def config() -> dict[str, Any]:
        small = FAMILIES["qwen2_5_vl"].config()
        tower = {
            **small["vision_config"],
            "depth": 8,
            "hidden_size": 256,
            "intermediate_size": 768,
            "out_hidden_size": 512,
            "num_heads": 4,
            "patch_size": _PATCH,
            "spatial_patch_size": _PATCH,
            "window_size": 8 * _PATCH,
            "fullatt_block_indexes": [3, 7],
        }
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        rope = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
        return {**small, **sizes, **heads, **rope, "vision_config": tower}

    family = FAMILIES["qwen2_5_vl"]
    pixels = {"patch_size": _PATCH, "min_pixels": _SIDE**2, "max_pixels": _SIDE**2}
    family = dataclasses.replace(family, config=config, processor={**family.processor, **pixels})
    tiny_vision_dir(parent, "qwen2_5_vl", family=family)


async def _measure(scratch: Path, log_file: Path, round_count: int) -> list[PictureTimes]:
    command = [sys.executable, "-m", "bench.vision", "--make", str(scratch)]
    subprocess.run(command, cwd=ROOT, env=child_environment(), check=True)
    model = scratch / "qwen2_5_vl"
    server = ServerProcess(model=str(model), cache_directory=scratch / "blocks", log_file=log_file)
    told: list[PictureTimes] = []
    with server, MlxVlmProcess(model_path=model, log_file=log_file) as peer:
        async with connected(server.address) as client:
            # One round more than is kept: the first one warms both up.
            for seed in range(round_count + 1):
                question = await text_of_tokens(client, TEXT_TOKEN_COUNT, seed=seed)
                told.append(PictureTimes(question, _png(seed)))
                await _first_session(client, peer, told[-1])
                console.print(f"picture {seed} of {round_count}: cold, from RAM, and the next turn")
    with server:
        async with connected(server.address) as client:
            for times in told:
                times.ssd_s, usage = await _ask(client, times)
                times.ssd_tokens = usage.ssd_tokens
    console.print("all pictures again after the restart")
    return told[1:]


async def _first_session(client: Client, peer: MlxVlmProcess, times: PictureTimes) -> None:
    times.cold_s, usage = await _ask(client, times)
    times.prompt_tokens, times.image_tokens = usage.prompt_tokens, usage.image_tokens
    assert times.image_tokens >= IMAGE_TOKEN_COUNT, times.image_tokens
    times.ram_s, usage = await _ask(client, times)
    times.ram_tokens = usage.ram_tokens
    times.next_turn_s, _ = await _ask(client, times, goes_on=True)
    times.peer_cold_s = peer.ttft_s(times.question, times.picture, max_output_tokens=OUTPUT_TOKEN_COUNT)
    times.peer_again_s = peer.ttft_s(times.question, times.picture, max_output_tokens=OUTPUT_TOKEN_COUNT)


async def _ask(client: Client, times: PictureTimes, *, goes_on: bool = False) -> tuple[float, Any]:
    """Return the time to the first token, and the usage."""
    parts = [
        prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(data=times.picture)),
        prompt_pb2.ContentPart(text=times.question),
    ]
    chat = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role="user", parts=parts)])
    if goes_on:
        chat.messages.add(role="assistant", content=_ANSWER)
        chat.messages.add(role="user", content=_NEXT_QUESTION)
    request = messages.GenerateRequest(chat=chat, max_output_tokens=OUTPUT_TOKEN_COUNT, cache=READ_WRITE)
    reply, _, finished = await client.stream(request)
    if not goes_on:
        times.replies.append(reply.token_ids)
    return reply.ttft_s, finished.usage


def _png(seed: int) -> bytes:
    """Return a picture of its own: a few large squares of colour."""
    import numpy as np  # not before the model was made
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares).resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def _ratios(told: Sequence[PictureTimes]) -> dict[str, Spread]:
    def of(name: str) -> list[float | None]:
        return [getattr(times, name) for times in told]

    return {
        "RAM hit / cold": ratios(of("ram_s"), of("cold_s")),
        "next turn, from RAM / cold": ratios(of("next_turn_s"), of("cold_s")),
        "SSD hit after restart / cold": ratios(of("ssd_s"), of("cold_s")),
        "mlx-vlm again / mlx-vlm cold": ratios(of("peer_again_s"), of("peer_cold_s")),
        "icehouse cold / mlx-vlm cold": ratios(of("cold_s"), of("peer_cold_s")),
        "icehouse RAM hit / mlx-vlm again": ratios(of("ram_s"), of("peer_again_s")),
        "icehouse SSD hit / mlx-vlm again": ratios(of("ssd_s"), of("peer_again_s")),
    }


def _report(told: Sequence[PictureTimes]) -> None:
    found = _ratios(told)
    show_table(
        f"TTFT, {told[0].image_tokens} image tokens of {told[0].prompt_tokens}, ratios picture by picture",
        ("compared", "median (min to max)"),
        ((name, spread.text(3)) for name, spread in found.items()),
    )
    names = ("cold_s", "ram_s", "next_turn_s", "ssd_s", "peer_cold_s", "peer_again_s")
    seconds = {name: spread_of(getattr(times, name) for times in told) for name in names}
    rows = ((name.removesuffix("_s"), f"{1000 * spread.median:.0f}") for name, spread in seconds.items())
    show_table("For orientation, this machine and moment only", ("TTFT", "ms"), rows)
    console.print(
        f"reused: {min(t.ram_tokens for t in told)} tokens or more from RAM, "
        f"{min(t.ssd_tokens for t in told)} or more from SSD; cold, RAM and SSD replies equal: "
        f"{sum(t.replies_are_equal for t in told)} of {len(told)}"
    )
    verdicts = [
        Verdict("RAM hit / cold", found["RAM hit / cold"], 0.05, False),
        Verdict("SSD hit / cold", found["SSD hit after restart / cold"], 0.08, False),
    ]
    show_verdicts(verdicts)
    rounds = [{k: v for k, v in dataclasses.asdict(times).items() if k != "picture"} for times in told]
    content = {"setting": setting(), "ratios": found, "targets": verdicts, "rounds": rounds}
    console.print(str(write_json("vision", content)))


if __name__ == "__main__":
    main()
