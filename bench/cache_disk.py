"""Bytes on disk of several conversations that share a prefix, against the bytes of distinct KV."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bench.cache_ttft import connected
from bench.grpc_clients import READ_WRITE, token_request
from bench.report import console
from bench.server_process import ServerProcess

CONVERSATION_COUNT = 8
SHARED_TOKEN_COUNT = 768
OWN_TOKEN_COUNT = 256


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUse:
    """File bytes after the server has stopped, and the bytes of distinct KV."""

    file_bytes: int
    unique_kv_bytes: int
    file_count: int

    @property
    def ratio(self) -> float:
        """File bytes over unique KV bytes."""
        return self.file_bytes / self.unique_kv_bytes


async def measure_disk(
    *, model_path: Path, scratch: Path, log_file: Path, kv_bytes_per_token: int
) -> DiskUse:
    """Run the conversations, stop the server, and measure its directory."""
    directory = scratch / "disk"
    server = ServerProcess(model=str(model_path), cache_directory=directory, log_file=log_file)
    shared = [10 + i % 200 for i in range(SHARED_TOKEN_COUNT)]
    with server:
        async with connected(server.address) as client:
            for number in range(CONVERSATION_COUNT):
                own = [10 + (7 * i + number) % 200 for i in range(OWN_TOKEN_COUNT)]
                request = token_request(shared + own, max_output_tokens=1, cache=READ_WRITE)
                await client.stream(request)
    console.print(f"disk use of {CONVERSATION_COUNT} conversations, counted after the stop")
    files = [path for path in directory.rglob("*") if path.is_file()]
    token_count = SHARED_TOKEN_COUNT + CONVERSATION_COUNT * OWN_TOKEN_COUNT
    return DiskUse(
        file_bytes=sum(path.stat().st_size for path in files),
        unique_kv_bytes=token_count * kv_bytes_per_token,
        file_count=len(files),
    )
