"""A cache directory that an older server left opens warm: its blocks are found, believed and reused.

`cache_21d6055.tar.gz` was written by the server of that commit, before the import package was renamed: a
tiny llama in float16 (`tests.fixtures.models`), blocks of 16 tokens, one prompt of 40 tokens, greedy. The
JSON file beside it holds what was asked and answered then, each block's SHA-256, and the times of the files,
which an archive does not keep to the nanosecond. Never write either anew: what is old is their point.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_server.clock import SystemClock
from icehouse_server.storage.directory.offline import OfflineStore
from icehouse_server.storage.directory.reconcile import Finding
from icehouse_server.storage.files import SystemFiles

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.whole_server import whole_server

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
    store = OfflineStore(str(directory), files=SystemFiles(), clock=SystemClock())
    rows = store.rows()
    assert {f"{record.hash.hex()}.safetensors" for record in rows.records} == set(GOLDEN["sha256"])
    assert rows.edited == ()
    found, file_count = store.check(progress=lambda count: None)
    # A copied file has another inode; so its header is read, and it says what the row says.
    assert ({item.finding for item in found}, file_count) == ({Finding.RESTAMPED}, len(rows.records))
    assert [(v.damage, v.detail) for v in store.verify(rows.records) if v.damage is not None] == []


@pytest.mark.parametrize("is_marked", [True, False], ids=["as it was left", "its mark of a clean end lost"])
async def test_todays_server_goes_on_from_it(tmp_path: Path, directory: Path, is_marked: bool) -> None:
    if not is_marked:
        (directory / "clean.json").unlink()
    asked = pb.GenerateRequest(max_output_tokens=len(GOLDEN["output_token_ids"]))
    asked.tokens.ids.extend(GOLDEN["prompt_token_ids"])
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
    assert report.row_count == len(GOLDEN["sha256"])
    # All of the prompt but its last token, which is computed to draw from.
    assert answer.usage.ssd_tokens == answer.usage.cached_tokens == len(GOLDEN["prompt_token_ids"]) - 1
    assert list(answer.token_ids) == GOLDEN["output_token_ids"]
    assert GOLDEN["sha256"].items() <= digests(directory).items(), "a block was written anew"


def flip_one_bit(path: Path) -> None:
    """Change the lowest bit of a weight that no sample covers; size and time stay as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        head_bytes = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(head_bytes))
        ranges = [entry["data_offsets"] for name, entry in head.items() if name != "__metadata__"]
        # Smaller ones were read whole by the old version too.
        large = min(start for start, stop in ranges if stop - start > 4096)
        file.seek(8 + head_bytes + large)
        (number,) = struct.unpack("<H", file.read(2))
        file.seek(8 + head_bytes + large)
        file.write(struct.pack("<H", number ^ 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_its_blocks_are_those_of_the_weights_that_opened_it(tmp_path: Path, directory: Path) -> None:
    """The old version told models apart by samples; one float changed since does not get these blocks."""
    model = tiny_model_dir(tmp_path, "llama", "float16")
    weights = next(iter(model.glob("model*.safetensors")))
    asked = pb.GenerateRequest(max_output_tokens=len(GOLDEN["output_token_ids"]))
    asked.tokens.ids.extend(GOLDEN["prompt_token_ids"])
    settings: dict[str, Any] = {
        "model__dtype": "float16",
        "cache__block_token_count": 16,
        "cache__min_prefix_token_count": 0,
    }
    known = []
    for changes in (False, True, True):
        if changes:
            flip_one_bit(weights)
        async with whole_server(model, directory, **settings) as served:
            known.append((await served.inference.Generate(asked)).usage.ssd_tokens)
    assert known == [len(GOLDEN["prompt_token_ids"]) - 1, 0, len(GOLDEN["prompt_token_ids"]) - 1]
