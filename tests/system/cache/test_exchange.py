"""Exports and imports over gRPC, between whole servers: the same tokens, sooner, all of it verified."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash
from icehouse.v1 import cache_service_pb2 as messages
from icehouse.v1 import inference_service_pb2 as inference
from icehouse_server.bootstrap.encryption import new_key_text
from icehouse_server.cli.cache_archive import import_directory
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.rpc.services import cache_transfer
from icehouse_server.storage import archive
from icehouse_server.storage.archive import ArchiveReader, BlockEntry

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.whole_server import WholeServer, whole_server
from tests.system.cache.test_reuse import prompt

BLOCK = 16
TOKENS = prompt(5 * BLOCK + 3)
SETTINGS: dict[str, Any] = {
    "cache__block_token_count": BLOCK,
    "cache__min_prefix_token_count": 0,
    "cache__restore_or_recompute": False,
    "engine__prefill_chunk_token_count": BLOCK,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@contextlib.asynccontextmanager
async def serving(model: Path, directory: Path, **settings: Any) -> AsyncIterator[WholeServer]:
    async with asyncio.timeout(3 * BOUND_S), whole_server(model, directory, **SETTINGS, **settings) as served:
        yield served


async def ask(served: WholeServer, tokens: list[int], *, tenant: str = "") -> tuple[list[int], int]:
    """Return what the model says, and how many tokens were not computed."""
    request = inference.GenerateRequest(
        prompt={"tokens": {"ids": tokens}}, max_output_tokens=6, cache={"tenant": tenant}
    )
    answer = await served.inference.Generate(request)
    return list(answer.token_ids), answer.usage.cached_tokens


async def export(served: WholeServer, tokens: list[int] | None = None, *, tenant: str = "") -> Any:
    """Return an archive and what was told of it."""
    request = messages.ExportRequest(cache={"tenant": tenant})
    if tokens is not None:
        request.prompt.tokens.ids.extend(tokens)
    responses = [response async for response in served.cache.Export(request)]
    assert all(len(each.chunk) <= 1 << 20 for each in responses)
    assert responses[-1].WhichOneof("event") == "done"
    return b"".join(each.chunk for each in responses), responses[-1].done


def parts(data: bytes, *, tenant: str = "", size: int = 1 << 20) -> Iterable[messages.ImportRequest]:
    yield messages.ImportRequest(target={"cache": {"tenant": tenant}})
    for start in range(0, len(data), size):
        yield messages.ImportRequest(chunk=data[start : start + size])


async def adopt(served: WholeServer, data: bytes, **how: Any) -> messages.ImportResponse:
    answer: messages.ImportResponse = await served.cache.Import(iter(parts(data, **how)))
    return answer


def refusals(answer: messages.ImportResponse) -> dict[str, int]:
    names = messages.ImportRefusal
    return {
        names.Name(each.reason).removeprefix("IMPORT_REFUSAL_"): each.block_count for each in answer.refusals
    }


def entries(data: bytes) -> list[BlockEntry]:
    return [item for item in ArchiveReader().feed(data) if isinstance(item, BlockEntry)]


async def test_a_prompt_goes_to_another_server_and_is_a_hit_there(tmp_path: Path, llama: Path) -> None:
    async with serving(llama, tmp_path / "a") as served:
        cold, cached = await ask(served, TOKENS)
        assert cached == 0
        # In RAM alone until now: it is written for the export.
        data, told = await export(served, TOKENS)
        assert told.block_count == len(entries(data)) >= 5 and told.left_out_block_count == 0
    async with serving(llama, tmp_path / "b") as served:
        answer = await adopt(served, data, size=1000)
        assert (answer.adopted_block_count, answer.stop_detail) == (told.block_count, "")
        assert answer.adopted_bytes == told.size_bytes and not answer.refusals
        tokens, cached = await ask(served, TOKENS)
        assert tokens == cold and cached >= 5 * BLOCK
        again = await adopt(served, data)
        assert (again.adopted_block_count, again.known_block_count) == (0, told.block_count)
    # It is on SSD, and there after a restart.
    async with serving(llama, tmp_path / "b") as served:
        tokens, found = await ask(served, TOKENS)
        assert tokens == cold and found >= cached


@pytest.mark.parametrize("is_target_encrypted", [False, True])
async def test_blocks_leave_an_encrypted_cache_in_the_clear_and_get_the_key_of_the_next(
    tmp_path: Path, llama: Path, is_target_encrypted: bool
) -> None:
    for name in ("key", "other"):
        (tmp_path / name).write_text(new_key_text())
        (tmp_path / name).chmod(0o600)
    async with serving(llama, tmp_path / "a", cache__key_file=str(tmp_path / "key")) as served:
        cold, _ = await ask(served, TOKENS)
        data, _ = await export(served)
    other = {"cache__key_file": str(tmp_path / "other")} if is_target_encrypted else {}
    async with serving(llama, tmp_path / "b", **other) as served:
        answer = await adopt(served, data)
        assert answer.adopted_block_count == len(entries(data)) and not answer.refusals
        tokens, cached = await ask(served, TOKENS)
        assert tokens == cold and cached >= 5 * BLOCK
    written = b"".join(path.read_bytes() for path in (tmp_path / "b").rglob("*.safetensors"))
    assert (b"icehouse.block.sealed" in written) is is_target_encrypted


async def test_the_archive_of_another_model_is_refused_by_both_names(tmp_path: Path, llama: Path) -> None:
    other = tiny_model_dir(tmp_path, "llama", dtype="float16")
    async with serving(llama, tmp_path / "a") as served:
        await ask(served, TOKENS)
        data, _ = await export(served)
        theirs = served.served.only.router.require_model().info.fingerprint_hex
    async with serving(other, tmp_path / "b") as served:
        refusal = await refused(adopt(served, data))
        own = served.served.only.router.require_model().info.fingerprint_hex
        assert refusal.reason == "MODEL_NOT_FOUND" and own != theirs
        assert own in refusal.message and theirs in refusal.message


async def test_a_tenant_exports_its_own_and_imports_as_its_own(tmp_path: Path, llama: Path) -> None:
    others = prompt(3 * BLOCK, salt=3)
    async with serving(llama, tmp_path / "a") as served:
        cold, _ = await ask(served, TOKENS, tenant="blue")
        await ask(served, others, tenant="red")
        data, _ = await export(served, tenant="blue")
        assert b"blue" not in data
        refusal = await refused(served.cache.Export(messages.ExportRequest(cache={"tenant": "grey"})).read())
        assert refusal.reason == "BLOCK_NOT_FOUND"
        # Under the new name it is nobody else's.
        answer = await adopt(served, data, tenant="green")
        assert answer.adopted_block_count == len(entries(data))
        assert (await ask(served, others, tenant="green"))[1] == 0
        assert await ask(served, TOKENS, tenant="green") == (cold, len(TOKENS) - 1)
        assert (await ask(served, TOKENS, tenant="red"))[1] == 0


async def test_what_was_altered_or_cut_off_is_adopted_up_to_there(tmp_path: Path, llama: Path) -> None:
    async with serving(llama, tmp_path / "a") as served:
        cold, _ = await ask(served, TOKENS)
        data, told = await export(served, TOKENS)
        middle = len(data) // 2
        flipped = data[:middle] + bytes((data[middle] ^ 1,)) + data[middle + 1 :]
        for tenant, damaged in (("flipped", flipped), ("cut", data[:middle])):
            answer = await adopt(served, damaged, tenant=tenant)
            assert answer.stop_detail and 0 < answer.adopted_block_count < told.block_count
            tokens, cached = await ask(served, TOKENS, tenant=tenant)
            assert tokens == cold and cached >= answer.adopted_block_count * BLOCK
        answer = await adopt(served, b"not an archive at all", tenant="none")
        assert "does not begin" in answer.stop_detail and answer.adopted_block_count == 0


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """Return an archive with something of its first block's file replaced, and every checksum made to fit."""
    reader, writer, out, file = ArchiveReader(), archive.ArchiveWriter(), b"", bytearray()
    for item in reader.feed(data):
        if isinstance(item, archive.ArchiveHeader):
            out += writer.begin(item)
        elif isinstance(item, BlockEntry):
            entry, file = item, bytearray()
        elif isinstance(item, bytes):
            file += item
        elif isinstance(item, archive.BlockEnd):
            changed = with_head(bytes(file), old, new) if entry.start_token_index == 0 else bytes(file)
            out += writer.block(entry)
            writer.part(changed)
            out += changed + writer.end_block()
        else:
            out += writer.end()
    return out


def with_head(file: bytes, old: bytes, new: bytes) -> bytes:
    assert old in file and len(old) == len(new)
    length = 8 + int.from_bytes(file[:8], "little")
    head = file[:length].replace(old, new)
    start = head.index(b'"header_xxh3":"') + len(b'"header_xxh3":"')
    zeroed = head[:start] + b"0" * 16 + head[start + 16 :]
    return head[:start] + b"%016x" % xxhash.xxh3_64_intdigest(zeroed) + head[start + 16 :] + file[length:]


@pytest.mark.parametrize(
    "old, new, why",
    [
        (b'"BF16"', b'"F16" ', "LAYOUT"),
        (b'"start_token_index":"0"', b'"start_token_index":"9"', "DAMAGED"),
        (b'"kv.000.k"', b'"kv.000.x"', "LAYOUT"),
    ],
)
async def test_a_hostile_block_with_right_checksums_never_reaches_the_model(
    tmp_path: Path, llama: Path, old: bytes, new: bytes, why: str
) -> None:
    folder = tiny_model_dir(tmp_path, "llama", dtype="bfloat16")
    async with serving(folder, tmp_path / "a") as served:
        cold, _ = await ask(served, TOKENS)
        data, told = await export(served, TOKENS)
    async with serving(folder, tmp_path / "b") as served:
        answer = await adopt(served, resealed(data, old, new))
        assert refusals(answer) == {why: 1, "PARENT_MISSING": told.block_count - 1}
        assert await ask(served, TOKENS) == (cold, 0)


async def test_the_quota_and_the_ssd_limit_are_kept_and_nothing_goes_for_an_import(
    tmp_path: Path, llama: Path
) -> None:
    async with serving(llama, tmp_path / "a") as served:
        await ask(served, TOKENS)
        data, told = await export(served, TOKENS)
    # A block on its way counts 64 KiB more than its file.
    async with serving(llama, tmp_path / "b", tenant__ssd_bytes=(70 << 10) + told.size_bytes // 2) as served:
        answer = await adopt(served, data)
        found = refusals(answer)
        assert answer.adopted_block_count + sum(found.values()) == told.block_count
        assert found["QUOTA"] == 1


async def test_an_import_waits_while_blocks_of_others_fill_the_write_queue(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_transfer, "_RETRY_S", 0.0)
    async with serving(llama, tmp_path / "a") as served:
        await ask(served, TOKENS)
        data, told = await export(served, TOKENS)
    async with serving(llama, tmp_path / "b") as served:
        assert served.served.tiers is not None
        queue = served.served.tiers._loop.state.spill_queue
        others_bytes = queue.free
        assert queue.try_reserve(others_bytes)
        looks = itertools.count(1)
        has_queue_space = Spills.has_queue_space

        def leave_at_last(self: Spills, size_bytes: int) -> bool:
            if next(looks) == 50:
                queue.release(others_bytes)
            return has_queue_space(self, size_bytes)

        monkeypatch.setattr(Spills, "has_queue_space", leave_at_last)
        answer = await adopt(served, data)
        assert (answer.adopted_block_count, refusals(answer)) == (told.block_count, {})


async def test_an_import_without_a_deadline_does_not_wait_for_ever(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_transfer, "_RETRY_S", 0.0)
    async with serving(llama, tmp_path / "a") as served:
        await ask(served, TOKENS)
        data, _ = await export(served, TOKENS)
    async with serving(llama, tmp_path / "b") as served:
        assert served.served.tiers is not None
        queue = served.served.tiers._loop.state.spill_queue
        assert queue.try_reserve(queue.free)
        with pytest.raises(grpc.aio.AioRpcError, match="write queue is full") as refused:
            await adopt(served, data)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_caller_who_sends_nothing_more_is_given_up_and_leaves_no_file(
    tmp_path: Path, llama: Path
) -> None:
    async with serving(llama, tmp_path / "a") as served:
        await ask(served, TOKENS)
        data, _ = await export(served, TOKENS)
    async with serving(llama, tmp_path / "b", server__stall_timeout_s=0.3) as served:
        call = served.cache.Import()
        for part in list(parts(data, size=len(data) // 2))[:2]:
            await call.write(part)
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "MESSAGE_LATE")
        # One that is cancelled ends as well, and both gave their places back.
        for _ in range(6):
            call = served.cache.Import()
            await call.write(next(iter(parts(data))))
            call.cancel()
        assert (await adopt(served, data)).stop_detail == ""
    assert not list((tmp_path / "b").rglob("*.partial"))


async def test_a_caller_who_reads_no_more_gives_its_place_back(tmp_path: Path, llama: Path) -> None:
    async with serving(llama, tmp_path / "a") as served:
        await ask(served, TOKENS)
        for _ in range(6):
            call = served.cache.Export(messages.ExportRequest())
            assert (await call.read()).chunk.startswith(archive.MAGIC)
            call.cancel()
        data, told = await export(served)
        assert told.block_count == len(entries(data)) > 4


async def test_a_reader_who_takes_nothing_is_ended_and_the_next_one_served(
    tmp_path: Path, llama: Path
) -> None:
    # More blocks than the connection holds, and no prompt so long that its attention takes seconds.
    prompts = [prompt(20 * BLOCK, salt=salt) for salt in range(10)]
    async with serving(llama, tmp_path / "a", server__stall_timeout_s=0.3) as served:
        await asyncio.gather(*(ask(served, tokens) for tokens in prompts))
        call = served.cache.Export(messages.ExportRequest())
        await call.initial_metadata()
        # Nothing is read until the server has given up: its status comes behind what was sent.
        await served.served.rpc._calls.idle.wait()
        refusal = await refused(drained(call))
        assert refusal.reason == "READER_STALLED"
        assert (await export(served, prompts[0][: 2 * BLOCK]))[1].block_count == 2


async def drained(call: Any) -> None:
    async for _ in call:
        pass


async def test_an_import_begins_with_its_target(tmp_path: Path, llama: Path) -> None:
    async with serving(llama, tmp_path / "a") as served:
        for requests in ([], [messages.ImportRequest(chunk=archive.MAGIC)]):
            refusal = await refused(served.cache.Import(iter(requests)))
            assert refusal.reason == "MESSAGE_MISSING"


async def test_an_archive_of_a_directory_is_its_own_tenants_alone(tmp_path: Path, llama: Path) -> None:
    """Made without knowing whose blocks they are: their root says it."""
    async with serving(llama, tmp_path / "a") as served:
        cold, _ = await ask(served, TOKENS, tenant="blue")
        data, _ = await export(served, tenant="blue")
    bare = without_adapters(data)
    async with serving(llama, tmp_path / "b") as served:
        answer = await adopt(served, bare, tenant="red")
        count = len(entries(bare))
        assert refusals(answer) == {"SCOPE": 1, "PARENT_MISSING": count - 1}
        assert (await adopt(served, bare, tenant="blue")).adopted_block_count == count
        assert (await ask(served, TOKENS, tenant="blue"))[0] == cold


def without_adapters(data: bytes) -> bytes:
    """Return an archive as `icehouse cache export` makes it."""
    writer, out = archive.ArchiveWriter(), b""
    for item in ArchiveReader().feed(data):
        if isinstance(item, archive.ArchiveHeader):
            out += writer.begin(item)
        elif isinstance(item, BlockEntry):
            fields = {name: getattr(item, name) for name in ("hash", "parent", "file_bytes")}
            out += writer.block(
                BlockEntry(start_token_index=item.start_token_index, token_count=item.token_count, **fields)
            )
        elif isinstance(item, bytes):
            writer.part(item)
            out += item
        elif isinstance(item, archive.BlockEnd):
            out += writer.end_block()
        else:
            out += writer.end()
    return out


async def test_states_are_exported_by_call_and_imported_by_directory(tmp_path: Path) -> None:
    """What a caller sends could be any state, so a server takes none; who writes its directory may."""
    model, file = tiny_model_dir(tmp_path, "lfm2"), tmp_path / "archive"
    async with serving(model, tmp_path / "a") as served:
        cold, _ = await ask(served, TOKENS)
        data, told = await export(served, TOKENS)
        assert told.block_count >= len(TOKENS) // BLOCK and not told.left_out_block_count
    file.write_bytes(data)
    import_directory(tmp_path / "b", str(file))
    async with serving(model, tmp_path / "b") as served:
        assert await ask(served, TOKENS) == (cold, len(TOKENS) - 1)
    async with serving(model, tmp_path / "c") as served:
        assert refusals(await adopt(served, data))["LAYOUT"] == 1
        assert await ask(served, TOKENS) == (cold, 0)
