"""`icehouse cache ls | inspect | check | verify | purge | …`: a look into the SSD tier's directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from icehouse_client.cli.console import AsJson, bar, confirm, err, harmless, out, print_json, show, table
from icehouse_client.cli.figures import age_text, size_text
from icehouse_client.cli.main import CommandLine
from rich.progress import TaskProgressColumn
from rich.table import Table
from rich.text import Text

from icehouse_server.bootstrap.encryption import find_cipher
from icehouse_server.cli import cache_archive
from icehouse_server.clock import SystemClock
from icehouse_server.config import load_config
from icehouse_server.domain.ids import Fingerprint
from icehouse_server.errors import Reason, StorageError
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.manifest import BlockRecord
from icehouse_server.storage.local.directory.offline import (
    BlockVerdict,
    ManifestRows,
    OfflineStore,
    PurgeScope,
)
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL

app = CommandLine()
app.command("export")(cache_archive.export_directory)
app.command("import")(cache_archive.import_directory)
app.command("copy")(cache_archive.copy_directory)

Directory = Annotated[
    Path | None,
    typer.Option("--cache-directory", help="The SSD tier's folder (default: the configured one)."),
]
_EXIT_FOUND = 1
_SECONDS_PER_DAY = 86_400
_HARMLESS = frozenset({ReconcileFinding.UNKNOWN, ReconcileFinding.RESTAMPED})
"""Shown by `check`, but not damage."""


@app.command("ls")
def list_blocks(
    directory: Directory = None,
    as_json: AsJson = False,
    fingerprint: Annotated[
        str, typer.Option(help="Only blocks of this model fingerprint (hex prefix).")
    ] = "",
    limit: Annotated[
        int, typer.Option(min=0, help="Maximum blocks to show, most recently used first; 0 shows all.")
    ] = 50,
) -> None:
    """List the blocks on SSD, the most recently used first."""
    store = _open(directory)
    rows = store.rows()
    chosen = [r for r in reversed(rows.records) if r.fingerprint.hex().startswith(fingerprint.lower())]
    shown = chosen[:limit] if limit else chosen
    if as_json:
        print_json([record_facts(record) for record in shown])
        return
    if not chosen:
        err.print(f"no blocks in {store.paths.root}; a server writes them when RAM is full and when it stops")
        return
    out.print(_block_table(rows, shown))
    total = size_text(sum(record.file_bytes for record in chosen))
    out.print(f"{len(shown)} of {len(chosen)} blocks shown; {total} in all")


@app.command()
def inspect(
    block: Annotated[str, typer.Argument(help="A block's hash, or a unique prefix of it.")],
    directory: Directory = None,
    as_json: AsJson = False,
    show_tokens: Annotated[
        bool, typer.Option(help="Also print the token ids, which are the prompt.")
    ] = False,
) -> None:
    """Show one block's manifest row and file."""
    store = _open_existing(directory)
    record = store.find(block)
    file = store.inspect(record)
    facts = record_facts(record)
    model = facts["model"] = dict(store.rows().fingerprints.get(record.fingerprint, {}))
    facts["path"] = store.paths.block(record.fingerprint, record.hash)
    facts["regions"] = [
        {
            "kind": str(region.kind),
            "offset": region.offset,
            "size_bytes": region.size_bytes,
            "stored_bytes": region.stored_bytes,
            "xxh3": f"{region.checksum:016x}",
            "tensors": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in region.tensors],
        }
        for region in file.regions
    ]
    if file.key_id:
        facts["encryption_key"] = file.key_id.hex()
    if show_tokens and file.header is not None:
        facts["token_ids"] = list(file.header.token_ids)
    elif show_tokens:
        err.print("the token ids are encrypted; give the key with ICEHOUSE_CACHE_KEY_FILE or _COMMAND")
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        if key not in ("regions", "model"):
            out.print(f"{key:20} {fact_text(key, value)}", markup=False)
    for key, value in model.items():
        out.print(f"model: {key}  {value}", markup=False)
    for region in file.regions:
        stored = f" in byte planes of {size_text(region.stored_bytes)}" if region.planes else ""
        out.print(
            f"region {region.kind}: {size_text(region.size_bytes)}{stored}, xxh3 {region.checksum:016x}"
        )
        for tensor in region.tensors:
            out.print(f"  {tensor.name:16} {tensor.dtype:5} {list(tensor.shape)}", markup=False)


@app.command()
def check(directory: Directory = None, as_json: AsJson = False) -> None:
    """Compare the manifest with the files, as the next start will; exit code 1 if anything needs repair."""
    store = _open_existing(directory)
    with bar("checking files", TaskProgressColumn(), total=len(store.rows().records)) as advance_to:
        found, file_count = store.check(progress=advance_to)
    if as_json:
        told = [
            {**{name: getattr(item, name) for name in _FOUND}, "hash": item.hash and item.hash.hex()}
            for item in found
        ]
        print_json({"files": file_count, "discrepancies": told})
    else:
        for item in found:
            detail = f" ({item.detail})" if item.detail else ""
            line = f"{item.finding}: {item.path or (item.hash or b'').hex()}{detail}"
            # Whoever can write to the directory chose these names.
            out.print(harmless(line).replace("\n", " "), markup=False)
        counts = ", ".join(f"{n} x {finding}" for finding, n in Counter(i.finding for i in found).items())
        out.print(f"{file_count} files, {counts or 'nothing to repair'}")
    if any(item.finding not in _HARMLESS for item in found):
        raise typer.Exit(_EXIT_FOUND)


@app.command()
def verify(
    directory: Directory = None,
    as_json: AsJson = False,
    block: Annotated[str, typer.Option(help="Only this block (hash or its beginning).")] = "",
) -> None:
    """Read every block and verify its checksums; exit code 1 if one is damaged. Changes nothing."""
    store = _open_existing(directory)
    records = [store.find(block)] if block else list(store.rows().records)
    damaged: list[BlockVerdict] = []
    done_bytes = 0
    with bar(
        "reading blocks", TaskProgressColumn(), total=sum(record.file_bytes for record in records)
    ) as advance_to:
        for verdict in store.verify(records):
            done_bytes += verdict.record.file_bytes
            advance_to(done_bytes)
            if verdict.damage is not None:
                damaged.append(verdict)
    if as_json:
        items = [{"hash": v.record.hash.hex(), "damage": str(v.damage), "detail": v.detail} for v in damaged]
        print_json({"blocks": len(records), "size_bytes": done_bytes, "damaged": items})
    else:
        for verdict in damaged:
            out.print(f"{verdict.record.hash.hex()} {verdict.damage}: {verdict.detail}", markup=False)
        out.print(f"{len(records)} blocks, {size_text(done_bytes)} read, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(_EXIT_FOUND)


@app.command()
def purge(
    directory: Directory = None,
    as_json: AsJson = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every block, the quarantine and the data keys.")
    ] = False,
    unencrypted: Annotated[
        bool, typer.Option("--unencrypted", help="Unencrypted blocks, and the quarantine.")
    ] = False,
    fingerprint: Annotated[str, typer.Option(help="The blocks of this model fingerprint (hex prefix).")] = "",
    block: Annotated[str, typer.Option(help="This block (hash or its beginning).")] = "",
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="Blocks not used for this many days.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove blocks for good. Stop the server first."""
    if not (everything or unencrypted or fingerprint or block or unused_days is not None):
        raise typer.BadParameter(
            "choose what to remove: --all, --unencrypted, --fingerprint, --block or --unused-days"
        )
    if everything and (unencrypted or fingerprint or block or unused_days is not None):
        raise typer.BadParameter("--all removes everything; leave it out to remove only some blocks")
    store = _open_existing(directory)
    before_time = SystemClock().wall() - (unused_days or 0) * _SECONDS_PER_DAY
    wanted_hash = store.find(block).hash if block else None
    # Everything is removed whatever the manifest says, even if it is unreadable.
    rows = ManifestRows((), (), {}) if everything else store.rows()

    def choose(record: BlockRecord) -> bool:
        return (
            not (unencrypted and KEY_DETAIL in rows.fingerprints.get(record.fingerprint, {}))
            and record.fingerprint.hex().startswith(fingerprint.lower())
            and (wanted_hash is None or record.hash == wanted_hash)
            and (unused_days is None or record.last_used_time <= before_time)
        )

    count = sum(choose(record) for record in rows.records)
    what = "everything" if everything else f"{count} blocks"
    if not yes:
        confirm(f"Remove {what} from {store.paths.root}?")
    scope = PurgeScope.EVERYTHING if everything else PurgeScope.CHOSEN
    with bar("removing blocks", TaskProgressColumn(), total=count) as advance_to:
        removed_count, removed_bytes = store.purge(
            choose,
            scope=PurgeScope.CLEAR_TEXT if unencrypted else scope,
            progress=lambda done, _: advance_to(done),
        )
    summary = f"{removed_count} files removed, {size_text(removed_bytes)} freed"
    show({"removed": removed_count, "size_bytes": removed_bytes}, summary, as_json=as_json)


def _open(directory: Path | None) -> OfflineStore:
    """Return the directory's store; raises StorageError if the path is not a readable directory."""
    flags = {} if directory is None else {"cache.directory": str(directory)}
    config = load_config(flags=flags, file=None).config.cache
    where = config.block_directory
    if where.exists() and not (where.is_dir() and os.access(where, os.R_OK | os.X_OK)):
        raise StorageError(
            Reason.STORE_UNUSABLE,
            f"{where} is not a directory that this user can read; choose another --cache-directory",
            metadata={"directory": str(where)},
        )
    files = Files()
    return OfflineStore(str(where), files=files, clock=SystemClock(), cipher=find_cipher(config, files))


def _open_existing(directory: Path | None) -> OfflineStore:
    """Return the store of a directory that a server has made; raises StorageError if there is none."""
    store = _open(directory)
    if not os.path.isdir(store.paths.blocks):
        raise StorageError(
            Reason.STORE_UNUSABLE,
            f"no cache in {store.paths.root}; a server creates it at its start, "
            "or name another directory with --cache-directory",
            metadata={"directory": store.paths.root},
        )
    return store


def _block_table(rows: ManifestRows, shown: Sequence[BlockRecord]) -> Table:
    now_time_s = SystemClock().wall()
    names = ("block", "model", "tokens", "size", "last used", "hits", "")
    cells = [
        (
            record.hash.hex()[:12],
            model_text(rows.fingerprints.get(record.fingerprint, {}), record.fingerprint),
            f"{record.start_token_index}..{record.start_token_index + record.token_count}",
            size_text(record.file_bytes),
            f"{age_text(now_time_s - record.last_used_time)} ago",
            str(record.hit_count),
            marks_text(record, now_time_s),
        )
        for record in shown
    ]
    shown_rows = table(*names, figures=("tokens", "size", "last used", "hits"))
    for column, texts in zip(shown_rows.columns, zip(names, *cells, strict=True), strict=True):
        # On a narrow terminal the model's name is cut, and none of the figures.
        column.min_width = None if column.header == "model" else max(map(len, texts))
    for row in cells:
        shown_rows.add_row(*map(Text, row))
    return shown_rows


_BYTES = ("file_bytes", "kv_bytes", "window_bytes", "checkpoint_bytes")
_FACTS = (
    *("hash", "parent", "fingerprint", "start_token_index", "token_count", "block_token_limit", *_BYTES),
    *("created_time", "last_used_time", "hit_count"),
)
_TIMES = ("created_time", "last_used_time")
_FOUND = ("finding", "path", "hash", "size_bytes", "detail")


def record_facts(record: BlockRecord) -> dict[str, object]:
    """Return a row for JSON: sizes in bytes, times in seconds since 1970."""
    facts = {name: getattr(record, name) for name in _FACTS}
    facts["pinned"] = record.pin_end_time > SystemClock().wall()
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in facts.items()}


def fact_text(name: str, value: object) -> str:
    """Return one fact of a row for people: sizes with units, local times."""
    if name in _BYTES and isinstance(value, int):
        return f"{value:,} bytes" + (f" ({size_text(value)})" if value >= 1024 else "")
    if name in _TIMES and isinstance(value, float):
        return f"{datetime.fromtimestamp(value).astimezone():%Y-%m-%d %H:%M:%S %Z}"
    return str(value)


def model_text(details: Mapping[str, str], fingerprint: Fingerprint) -> str:
    """Return a model in a few words: architecture, quantization, encryption, start of the fingerprint."""
    quantization = details.get("quantization", "none")
    words = (
        details.get("architecture", ""),
        "" if quantization == "none" else quantization,
        "encrypted" if KEY_DETAIL in details else "",
        fingerprint.hex()[:8],
    )
    return " ".join(filter(None, words))


def marks_text(record: BlockRecord, now_time_s: float) -> str:
    """Return what is special about a block, or ""."""
    marks = {
        "pinned": record.pin_end_time > now_time_s,
        "tail": record.token_count < record.block_token_limit,
        "checkpoint": record.checkpoint_bytes > 0,
    }
    return " ".join(mark for mark, is_so in marks.items() if is_so)
