"""Block facts as the cache commands print them: for programs and for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from icehouse_client.cli.figures import size_text

from icehouse_server.domain.ids import Fingerprint
from icehouse_server.storage.local.directory.reconcile import Discrepancy
from icehouse_server.storage.local.directory.record import BlockRecord
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL

_BYTES = ("file_bytes", "kv_bytes", "window_bytes", "checkpoint_bytes")
_TIMES = ("created_time", "last_used_time")


def record_facts(record: BlockRecord) -> dict[str, object]:
    """Return a row for JSON: sizes in bytes, times in seconds since 1970."""
    return {
        "hash": record.hash.hex(),
        "parent": record.parent.hex(),
        "fingerprint": record.fingerprint.hex(),
        "start_token_index": record.start_token_index,
        "token_count": record.token_count,
        "block_token_limit": record.block_token_limit,
        "file_bytes": record.file_bytes,
        "kv_bytes": record.kv_bytes,
        "window_bytes": record.window_bytes,
        "checkpoint_bytes": record.checkpoint_bytes,
        "created_time": record.created_time,
        "last_used_time": record.last_used_time,
        "hit_count": record.hit_count,
        "pinned": record.pinned,
    }


def discrepancy_facts(item: Discrepancy) -> dict[str, object]:
    """Return a finding of `check` for JSON."""
    return {
        "finding": str(item.finding),
        "path": item.path,
        "hash": item.hash.hex() if item.hash else None,
        "size_bytes": item.size_bytes,
        "detail": item.detail,
    }


def fact_text(name: str, value: object) -> str:
    """Return one of a row's facts for people: sizes with units, times of this place."""
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


def marks_text(record: BlockRecord) -> str:
    """Return what is special about a block, "" for nothing."""
    marks = []
    if record.pinned:
        marks.append("pinned")
    if record.token_count < record.block_token_limit:
        marks.append("tail")
    if record.checkpoint_bytes:
        marks.append("checkpoint")
    return " ".join(marks)
