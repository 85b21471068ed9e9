"""Gain from OpenBLAS in front of MLX's CPU build: the prefill of Gemma 3 270M with it and without.

    python -m bench.blas [--rounds N] [--tokens N]

Each round starts the server twice, as it starts by itself (OpenBLAS, float32) and with
`--no-preload` (the wheel's own BLAS, the model's own type), and prefills one prompt in each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc

from bench.grpc_clients import NO_CACHE
from bench.report import ratios, spread_of
from bench.server_process import ServerProcess

_FIRST_TOKEN_ID = 1000
"""Well above the model's special tokens."""
_CALL_TIMEOUT_S = 300


def prefill_tokens_per_s(flags: list[str], *, token_count: int, folder: Path) -> float:
    """Start a server with these flags, prefill once to warm up and once to measure."""
    server = ServerProcess(
        model="demo-gemma",
        cache_directory=folder / "blocks",
        log_file=folder / "server.log",
        flags=["--no-cache", *flags],
    )
    with server, grpc.insecure_channel(server.address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = messages.GenerateRequest(
            prompt={"tokens": {"ids": range(_FIRST_TOKEN_ID, _FIRST_TOKEN_ID + token_count)}},
            max_output_tokens=1,
            cache=NO_CACHE,
        )
        for _ in range(2):
            usage = stub.Generate(request, timeout=_CALL_TIMEOUT_S).usage
    return token_count / (usage.prefill_duration.ToNanoseconds() / 1e9)


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"--preload": [], "--no-preload": []}
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as folder:
        for _ in range(options.rounds):
            for flag, found in rates.items():
                rate = prefill_tokens_per_s([flag], token_count=options.tokens, folder=Path(folder))
                found.append(rate)
    for flag, found in rates.items():
        print(f"{flag:<14} {spread_of(found).text(0)} prefilled tokens/s")
    print(f"ratio          {ratios(rates['--preload'], rates['--no-preload']).text(1)}")


if __name__ == "__main__":
    main()
