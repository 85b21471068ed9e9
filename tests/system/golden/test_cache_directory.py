"""A cache directory that an older server left opens as it is, and its blocks are still blocks.

`cache_21d6055.tar.gz` was written by the server of that commit, before the import package was renamed: a
tiny llama in float16 (`tests.fixtures.models`), blocks of 16 tokens, one prompt of 40 tokens, greedy. The
JSON file beside it holds what was asked and answered then, each block's SHA-256, and the times of the files,
which an archive does not keep to the nanosecond. Never write either anew: what is old is their point.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_server.clock import SystemClock
from icehouse_server.domain.cache_stats import UNRECORDED_CODE
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.offline import OfflineStore
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.whole_server import whole_server
from tests.system.cache.server import CacheServer

FOLDER = Path(__file__).resolve().parent
GOLDEN: dict[str, Any] = json.loads((FOLDER / "cache_21d6055.json").read_text(encoding="utf-8"))
REPAIRS = (
    "partial_deleted_count",
    "adopted_count",
    "quarantined_count",
    "row_deleted_count",
    "other_layout_deleted_count",
    "unknown_file_count",
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The old server's directory, its files' times as that server left them."""
    with tarfile.open(FOLDER / "cache_21d6055.tar.gz") as archive:
        # Our own archive; the first releases of Python 3.11 have no filters.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    root = tmp_path / "blocks"
    # Folders last: what is made in them changes their time.
    for name in sorted(GOLDEN["mtimes_ns"], reverse=True):
        time_ns = GOLDEN["mtimes_ns"][name]
        os.utime(root / name, ns=(time_ns, time_ns))
    return root


def digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every block file."""
    found = directory.rglob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_every_row_has_its_file_and_every_block_is_whole(directory: Path) -> None:
    store = OfflineStore(str(directory), files=Files(), clock=SystemClock())
    rows = store.rows()
    assert {f"{record.hash.hex()}.safetensors" for record in rows.records} == set(GOLDEN["sha256"])
    assert rows.edited == ()
    found, file_count = store.check(progress=lambda count: None)
    # A copied file has another inode; so its header is read, and it says what the row says.
    assert ({item.finding for item in found}, file_count) == ({ReconcileFinding.RESTAMPED}, len(rows.records))
    assert [(v.damage, v.detail) for v in store.verify(rows.records) if v.damage is not None] == []


@pytest.mark.parametrize("is_marked", [True, False], ids=["as it was left", "its mark of a clean end lost"])
async def test_todays_server_opens_it_and_begins_cold_beside_it(
    tmp_path: Path, directory: Path, is_marked: bool
) -> None:
    """Which code computed these blocks nobody knows any more, so they are kept and not used."""
    if not is_marked:
        (directory / "clean.json").unlink()
    asked = pb.GenerateRequest(max_output_tokens=len(GOLDEN["output_token_ids"]))
    asked.prompt.tokens.ids.extend(GOLDEN["prompt_token_ids"])
    model = tiny_model_dir(tmp_path, "llama", "float16")
    async with whole_server(
        model,
        directory,
        model__dtype="float16",
        cache__block_token_count=16,
        cache__min_prefix_token_count=0,
    ) as served:
        opened = (await served.inference.CacheStats(pb.CacheStatsRequest())).cache
        answer = await served.inference.Generate(asked)
    report = opened.last_reconcile
    assert (report.clean, report.manifest_rebuilt) == (is_marked, False)
    assert {name: getattr(report, name) for name in REPAIRS} == dict.fromkeys(REPAIRS, 0)
    assert report.row_count == opened.disk.other_model_block_count == len(GOLDEN["sha256"])
    assert list(report.changed_code) == [UNRECORDED_CODE]
    assert (answer.usage.cached_tokens, list(answer.token_ids)) == (0, GOLDEN["output_token_ids"])
    assert GOLDEN["sha256"].items() <= digests(directory).items(), "a block is gone or was written anew"


def test_its_blocks_are_found_believed_and_reused(tmp_path: Path, directory: Path) -> None:
    """By a server whose model is called what it was called then."""
    (name,) = OfflineStore(str(directory), files=Files(), clock=SystemClock()).rows().fingerprints
    model = tiny_model_dir(tmp_path, "llama", "float16")
    with CacheServer(model, directory, fingerprint=name) as served:
        answer = served.ask(
            "warm", GOLDEN["prompt_token_ids"], max_output_tokens=len(GOLDEN["output_token_ids"])
        )
    # All of the prompt but its last token, which is computed to draw from.
    assert answer.cache.ssd_token_count == len(GOLDEN["prompt_token_ids"]) - 1
    assert answer.tokens == GOLDEN["output_token_ids"]
    assert GOLDEN["sha256"].items() <= digests(directory).items(), "a block was written anew"
