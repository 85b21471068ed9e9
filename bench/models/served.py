"""Served models: `icehouse serve` with a configuration file that names several, and what its log says."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path

from bench.server_process import ServerProcess


def pool_process(
    folders: Sequence[Path], scratch: Path, *, log_file: Path, flags: Sequence[str] = ()
) -> ServerProcess:
    """Return a server of the models in these folders, called by the folders' names, not started.

    Its blocks are in a folder of `scratch`, and each line of its log is JSON.
    """
    tables = [
        f"[[models]]\nmodel = {json.dumps(str(folder))}\nmodel_name = {json.dumps(folder.name)}\n"
        for folder in folders
    ]
    settings = scratch / "models.toml"
    settings.write_text("\n".join(tables), encoding="utf-8")
    return ServerProcess(
        cache_directory=blocks_of(scratch),
        log_file=log_file,
        flags=["--config", str(settings), "--log-format", "json", *flags],
    )


def blocks_of(scratch: Path) -> Path:
    """Return the folder of the blocks of such a server."""
    return scratch / "blocks"


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights."""
    return sorted(folder.glob("model*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Return the size of a folder's weights on disk."""
    return sum(file.stat().st_size for file in weight_files(folder))


def forget(files: Sequence[Path]) -> None:
    """Have the system drop what it holds of files in memory, so that they are read from the disk (Linux)."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def logged_times(log_file: Path, *, start: int) -> dict[str, float]:
    """Return the Unix time of the last line of each event behind the first `start` bytes of a log."""
    with log_file.open("rb") as log:
        log.seek(start)
        lines = [json.loads(line) for line in log]
    return {line["message"]: datetime.datetime.fromisoformat(line["time"]).timestamp() for line in lines}


def cpu_s(process_id: int) -> float:
    """Return the seconds of processor time that a process has had (Linux)."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    user_ticks, system_ticks = int(fields[11]), int(fields[12])
    return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")
