"""`icehouse cache export | import | copy`: blocks of a cache directory that no server uses, as an archive."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from icehouse_client.archive_files import opened, written
from icehouse_client.cli.console import EXIT_FAILURE, AsJson, UsageError, bar, err, harmless, show
from icehouse_client.cli.figures import size_text
from rich.progress import TaskProgressColumn

from icehouse_server.bootstrap.encryption import find_cipher
from icehouse_server.clock import SystemClock
from icehouse_server.config import CacheConfig, load_config
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.directory_exchange import (
    CHUNK_BYTES,
    ExportReport,
    ExportSource,
    ImportReport,
    ImportTarget,
)
from icehouse_server.storage.local.directory.offline import OfflineStore

if TYPE_CHECKING:
    # This needs an optional extra.
    from icehouse_server.storage.local.encryption.aes_gcm import Cipher

_PIPE = "-"

Source = Annotated[Path, typer.Argument(help="The cache directory to read blocks from.")]
Target = Annotated[Path, typer.Argument(help="The cache directory to add the blocks to; created if missing.")]
Fingerprint = Annotated[
    str,
    typer.Option(help="Only blocks of this model fingerprint (hex prefix); required if there are several."),
]
Block = Annotated[
    str, typer.Option(help="Only the prompt that ends with this block (hash or its beginning).")
]


def export_directory(
    directory: Source,
    file: Annotated[str, typer.Argument(help="The archive to write; - is standard output.")],
    as_json: AsJson = False,
    fingerprint: Fingerprint = "",
    block: Block = "",
) -> None:
    """Write a directory's blocks to an archive, which contains the prompts' tokens. Stop its server first."""
    report: list[ExportReport] = []
    stream = sys.stdout.buffer if file == _PIPE else file
    with (
        bar("writing blocks", TaskProgressColumn()) as progress,
        _failing_as_usage(f"{file} cannot be written"),
        written(stream) as write,
    ):
        for part in _parts(directory, report, fingerprint=fingerprint, block=block, progress=progress):
            write(part)
    _show_export(report[0], as_json=as_json, to_pipe=file == _PIPE)


def import_directory(
    directory: Target,
    file: Annotated[str, typer.Argument(help="The archive to read; - is standard input.")],
    as_json: AsJson = False,
) -> None:
    """Import an archive's blocks into a directory; exit code 1 if some were not. Stop its server first."""
    stream = sys.stdin.buffer if file == _PIPE else file
    with (
        bar("adopting blocks", TaskProgressColumn()) as progress,
        _failing_as_usage(f"{file} cannot be read"),
        opened(stream) as source,
    ):
        report = _target(directory).adopt(iter(lambda: source.read(CHUNK_BYTES), b""), progress=progress)
    _show_import(report, as_json=as_json)


def copy_directory(
    source: Source,
    target: Target,
    as_json: AsJson = False,
    fingerprint: Fingerprint = "",
    block: Block = "",
) -> None:
    """Copy blocks from one directory to another; exit code 1 if some were not. Stop their servers first."""
    if source.resolve() == target.resolve():
        raise UsageError(f"{source} and {target} are the same directory; choose another target")
    with bar("copying blocks", TaskProgressColumn()) as progress:
        parts = _parts(source, [], fingerprint=fingerprint, block=block, progress=lambda _: None)
        report = _target(target).adopt(parts, progress=progress)
    _show_import(report, as_json=as_json)


def _parts(
    directory: Path,
    report: list[ExportReport],
    *,
    fingerprint: str,
    block: str,
    progress: Callable[[int], None],
) -> Iterator[bytes]:
    """Yield an archive's bytes, and put a report of its contents into `report`."""
    config, files, cipher = _settings_of(directory)
    if not os.path.isdir(config.block_directory):
        raise UsageError(f"no cache in {config.block_directory}; name the cache directory of a server")
    store = OfflineStore(str(config.block_directory), files=files, clock=SystemClock(), cipher=cipher)
    source = ExportSource(store, files=files, cipher=cipher)
    for part in source.stream(fingerprint=fingerprint, block=block, progress=progress):
        if isinstance(part, ExportReport):
            report.append(part)
        else:
            yield part


def _target(directory: Path) -> ImportTarget:
    config, files, cipher = _settings_of(directory)
    return ImportTarget(
        str(config.block_directory),
        files=files,
        clock=SystemClock(),
        limit_bytes=config.ssd_bytes,
        free_floor_bytes=config.free_space_floor_bytes,
        cipher=cipher,
    )


def _settings_of(directory: Path) -> tuple[CacheConfig, Files, Cipher | None]:
    config = load_config(flags={"cache.directory": str(directory)}, file=None).config.cache
    files = Files()
    return config, files, find_cipher(config, files)


@contextlib.contextmanager
def _failing_as_usage(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from error


def _show_export(report: ExportReport, *, as_json: bool, to_pipe: bool) -> None:
    facts = {
        "blocks": report.block_count,
        "size_bytes": report.size_bytes,
        "left_out": report.left_out_count,
    }
    text = f"{report.block_count} blocks written, {size_text(report.size_bytes)}"
    if report.left_out_count:
        text += f"; {report.left_out_count} left out: damaged, or an earlier block of their prompt is missing"
    if to_pipe:
        # Standard output is the archive.
        err.print(text, markup=False)
    else:
        show(facts, text, as_json=as_json)


def _show_import(report: ImportReport, *, as_json: bool) -> None:
    refused = {str(why): count for why, count in report.refused.items()}
    facts = {
        "adopted": report.adopted_count,
        "size_bytes": report.adopted_bytes,
        "known": report.known_count,
        "refused": refused,
        "stopped": report.stop_detail,
    }
    parts = [f"{report.adopted_count} blocks adopted", size_text(report.adopted_bytes)]
    parts.append(f"{report.known_count} already there")
    parts += [f"{count} refused ({why})" for why, count in refused.items()]
    show(facts, ", ".join(parts), as_json=as_json)
    if report.stop_detail:
        err.print(harmless(f"the rest of the archive was not read: {report.stop_detail}"), markup=False)
    if report.stop_detail or refused:
        raise typer.Exit(EXIT_FAILURE)
