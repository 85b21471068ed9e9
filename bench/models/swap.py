"""Swap: the first token of a conversation whose model is absent, because memory holds one of two.

Both conversations are on SSD. Weights and blocks are read from the disk, not from the system's memory, in the
same round as a plain read of the weights and a cold prefill of as many tokens.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from bench.grpc_clients import READ_WRITE, Client, connected, token_request
from bench.models.served import blocks_of, forget, logged_times, pool_process, weight_bytes, weight_files
from bench.report import Verdict, console, show_table, spread_of

TOKEN_COUNT = 2000
OVER_READ_TARGET = 0.15
_KV_ROOM_BYTES = 256 << 20
_OUTPUT_TOKEN_COUNT = 4
_PIECE_BYTES = 8 << 20
_PHASES = (
    ("to the pool", "model_found"),
    ("the other one leaves", "model_unloaded"),
    ("tokenizer, fingerprint", "model_opened"),
    ("weights", "weights_read"),
    ("probe, warm-up", "model_loaded"),
)
"""What ends with each event of the server's log, in their order."""


@dataclasses.dataclass(slots=True)
class SwapTimes:
    """One model's return, in seconds."""

    model: str
    read_s: float = 0.0
    """Of the weights' files, by themselves."""
    absent_s: float = 0.0
    """From the request to the first token, the model absent."""
    load_s: float = 0.0
    """Of that, as the server says, until the model was there."""
    cold_s: float = 0.0
    """To the first token of an unknown prompt of as many tokens, the model there."""
    ssd_token_count: int = 0
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def over_read(self) -> float:
        """What the first token took beyond reading the weights, as a part of cold prefill."""
        return (self.absent_s - self.read_s) / self.cold_s


async def measure_swaps(
    folders: Sequence[Path], scratch: Path, log_file: Path, *, round_count: int
) -> list[SwapTimes]:
    """Have two models take turns; return each return of each of them."""
    limit_bytes = max(map(weight_bytes, folders)) + _KV_ROOM_BYTES
    assert limit_bytes < sum(map(weight_bytes, folders)), "both models fit"
    flags = ["--memory-limit-bytes", str(limit_bytes)]
    found: list[SwapTimes] = []
    with pool_process(folders, scratch, log_file=log_file, flags=flags) as server:
        async with connected(server.address, 1) as (client,):
            for seed, folder in enumerate(folders):
                await _ask(client, folder, seed=seed)
            for number in range(round_count):
                for seed, folder in enumerate(folders):
                    times = SwapTimes(folder.name)
                    await _swap(client, folder, scratch, log_file, times, seed=seed)
                    unknown = len(folders) * (number + 1) + seed
                    times.cold_s, _, cold_tokens = await _ask(client, folder, seed=unknown)
                    assert not cold_tokens, "the prompt was not new to the server"
                    found.append(times)
                    console.print(
                        f"{folder.name}: absent {times.absent_s:.2f} s, read {times.read_s:.2f} s, cold "
                        f"{times.cold_s:.2f} s"
                    )
    return found


async def _swap(
    client: Client, folder: Path, scratch: Path, log_file: Path, times: SwapTimes, *, seed: int
) -> None:
    files = weight_files(folder)
    forget(files)
    times.read_s = _read_s(files)
    forget([*files, *blocks_of(scratch).rglob("*.safetensors")])
    start, began = log_file.stat().st_size, time.time()
    times.absent_s, times.load_s, times.ssd_token_count = await _ask(client, folder, seed=seed)
    assert times.load_s, "the model was not absent"
    logged = logged_times(log_file, start=start)
    for name, event in _PHASES:
        ended = logged[event]
        times.phases_s[name] = ended - began
        began = ended
    times.phases_s["restore, first pass"] = times.absent_s - sum(times.phases_s.values())


async def _ask(client: Client, folder: Path, *, seed: int) -> tuple[float, float, int]:
    """Return the seconds to the first token, those of loading, and the tokens that came from SSD."""
    ids = [10 + (7 * seed + 31 * place + seed * place) % 240 for place in range(TOKEN_COUNT)]
    request = token_request(ids, max_output_tokens=_OUTPUT_TOKEN_COUNT, cache=READ_WRITE)
    request.model = folder.name
    reply, started, finished = await client.stream(request)
    return reply.ttft_s, started.load_duration.ToMilliseconds() / 1000, finished.usage.ssd_tokens


def _read_s(files: Sequence[Path]) -> float:
    piece, began = bytearray(_PIECE_BYTES), time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(piece):
                pass
    return time.perf_counter() - began


def swap_verdicts(found: Sequence[SwapTimes]) -> list[Verdict]:
    """Return whether a model comes back as fast as it should."""
    over = spread_of(times.over_read for times in found)
    return [Verdict("(first token - weights' read) / cold prefill", over, OVER_READ_TARGET, at_least=False)]


def show_swaps(found: Sequence[SwapTimes]) -> None:
    """Print where the time to the first token goes."""
    rows = [
        ("weights' files, by themselves", spread_of(times.read_s for times in found)),
        ("first token, model absent", spread_of(times.absent_s for times in found)),
        *((name, spread_of(times.phases_s[name] for times in found)) for name in found[0].phases_s),
        ("first token, cold, model there", spread_of(times.cold_s for times in found)),
    ]
    show_table(
        f"Seconds of a conversation of {TOKEN_COUNT} tokens, {min(t.ssd_token_count for t in found)} of them "
        "or more from SSD: median (min to max)",
        ("what", "s"),
        [(name, spread.text(3)) for name, spread in rows],
    )
