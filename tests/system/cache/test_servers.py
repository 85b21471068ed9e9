"""Engine, tiers and a tiny real model together: small RAM, every KV type, chunk sizes, neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Verify
from icehouse_server.domain.events import Failed, ReuseLimit
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.domain.request import CacheUse
from icehouse_server.domain.sampling import SamplingParams

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.damage import block_files
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

TOKENS = prompt(5 * BLOCK + 7)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "gemma3_text")


def block_bytes(folder: Path) -> int:
    """Return how much RAM a full block of this model takes."""
    with CacheServer(folder, None) as served:
        served.ask("measure", prompt(BLOCK + 1), max_output_tokens=0)
        (entry,) = list(served.cache.tree.in_ram())
        return entry.ram_bytes


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1", "mamba2"])
def test_ram_for_a_few_blocks_only(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    prompts = [prompt(5 * BLOCK + 3, salt=salt) for salt in range(3)]
    with CacheServer(folder, None, is_enabled=False) as served:
        expected = [served.ask(f"cold {i}", tokens).tokens for i, tokens in enumerate(prompts)]
    with CacheServer(folder, tmp_path / "blocks") as served:
        served.ask("measure", prompts[0], max_output_tokens=0)
        whole_bytes = served.cache.tree.ram.used_bytes
    ssd_tokens = 0
    with CacheServer(folder, tmp_path / "few", ram_bytes=whole_bytes * 2 // 3) as served:
        for turn in range(3):
            for i, tokens in enumerate(prompts):
                answer = served.ask(f"{turn} {i}", tokens)
                assert answer.tokens == expected[i]
                assert answer.cache.limit is not ReuseLimit.LOAD_FAILED
                ssd_tokens += answer.cache.ssd_token_count
                # What is on its way out is in RAM still; the next request is to find it on SSD.
                stats = served.settle()
    assert ssd_tokens > 6 * BLOCK
    assert stats.ram.evicted_block_total > 0 and stats.spill.persisted_block_total > 0
    assert stats.promote.failed_load_total == 0


def test_a_block_bigger_than_the_whole_ram_tier(tmp_path: Path, llama: Path) -> None:
    with CacheServer(llama, tmp_path, ram_bytes=block_bytes(llama) // 2) as served:
        answers = [served.ask(name, TOKENS) for name in ("a", "b")]
        _, stats = served.stats()
    assert answers[0].tokens == answers[1].tokens
    assert stats.ram.size_bytes <= stats.ram.limit_bytes


@pytest.mark.parametrize(
    ("dtype", "kv_bits"),
    [("bfloat16", 0), ("float16", 0), ("float32", 4), ("float32", 8), ("bfloat16", 8)],
)
def test_every_kv_type_comes_back_bit_for_bit(tmp_path: Path, dtype: str, kv_bits: int) -> None:
    folder = tiny_model_dir(tmp_path, "llama", dtype=dtype)
    how = {"kv_bits": kv_bits, "kv_group_size": 32}
    with CacheServer(folder, tmp_path, **how) as served:
        cold = served.ask("cold", TOKENS)
        ram = served.ask("ram", TOKENS)
    written = {path: path.read_bytes() for path in block_files(tmp_path)}
    with CacheServer(folder, tmp_path, **how) as served:
        ssd = served.ask("ssd", TOKENS)
        for path in written:
            path.unlink()
        served.order(Verify())
    # What was restored and kept in RAM went to SSD anew: as much as the steps had time to copy.
    rewritten = {path: path.read_bytes() for path in block_files(tmp_path) if path in written}
    assert rewritten
    assert all(written[path] == data for path, data in rewritten.items())
    assert cold.tokens == ram.tokens == ssd.tokens
    assert ram.cache.ram_token_count == len(TOKENS) - 1 == ssd.cache.ssd_token_count


@pytest.mark.parametrize("chunk", [BLOCK // 2, 2 * BLOCK, 4 * BLOCK])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_chunks_that_are_not_a_block(tmp_path: Path, architecture: str, chunk: int) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    longer = [*TOKENS, *prompt(BLOCK, salt=9)]
    with CacheServer(folder, tmp_path, chunk=chunk) as served:
        cold = served.ask("cold", TOKENS)
        ram = served.ask("ram", TOKENS)
        warm = served.ask("longer", longer)
    with CacheServer(folder, tmp_path, chunk=chunk) as served:
        ssd = served.ask("ssd", TOKENS)
        ssd_longer = served.ask("longer", longer)
    with CacheServer(folder, None, is_enabled=False, chunk=chunk) as served:
        reference = served.ask("longer", longer)
    assert cold.tokens == ram.tokens == ssd.tokens
    assert warm.tokens == ssd_longer.tokens == reference.tokens
    assert ram.cache.ram_token_count == len(TOKENS) - 1 == ssd.cache.ssd_token_count


def test_a_window_that_has_wrapped_many_times(tmp_path: Path, gemma: Path) -> None:
    tokens = prompt(3 * BLOCK + 2)
    with CacheServer(gemma, tmp_path) as served:
        reply = served.ask("long", tokens, max_output_tokens=4 * BLOCK)
        second = [*tokens, *reply.tokens, *prompt(5, salt=4)]
        ram = served.ask("ram", second)
    with CacheServer(gemma, tmp_path) as served:
        ssd = served.ask("ssd", second)
    with CacheServer(gemma, None, is_enabled=False) as served:
        cold = served.ask("cold", second)
    assert cold.tokens == ram.tokens == ssd.tokens
    assert ram.cache.ram_token_count == len(tokens) + len(reply.tokens) - 1
    assert ssd.cache.ssd_token_count >= len(tokens) + len(reply.tokens) - BLOCK


def test_identical_prompts_at_the_same_time(tmp_path: Path, llama: Path) -> None:
    with CacheServer(llama, tmp_path) as served:
        for i in range(6):
            served.submit(f"r{i}", TOKENS)
        answers = [served.answer(f"r{i}").tokens for i in range(6)]
        _, stats = served.stats()
    assert all(tokens == answers[0] for tokens in answers)
    # Five whole blocks, the prompt's tail that grew into the reply's, and the reply's end at most.
    assert stats.ram.block_count <= 7
    assert len(block_files(tmp_path)) == stats.ram.block_count


def test_cancelled_in_the_middle_of_its_prompt(tmp_path: Path, llama: Path) -> None:
    long = prompt(40 * BLOCK)
    with CacheServer(llama, tmp_path) as served:
        served.recorder.on_first_progress("gone", lambda: served.engine.cancel(RequestId("gone")))
        served.submit("gone", long)
        assert isinstance(served.recorder.wait_for_end("gone"), Failed)
        again = served.ask("again", long)
    assert BLOCK <= again.cache.ram_token_count < len(long) - 1


def test_cancelled_before_its_first_token(tmp_path: Path, llama: Path) -> None:
    with CacheServer(llama, tmp_path) as served:
        served.recorder.on_last_progress("gone", lambda: served.engine.cancel(RequestId("gone")))
        served.submit("gone", TOKENS, max_output_tokens=200)
        assert isinstance(served.recorder.wait_for_end("gone"), Failed)
        assert served.ask("again", TOKENS).cache.ram_token_count == len(TOKENS) - 1


@pytest.mark.parametrize("use", list(CacheUse))
def test_the_text_does_not_depend_on_the_policy(tmp_path: Path, llama: Path, use: CacheUse) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
    with CacheServer(llama, tmp_path) as served:
        cold = served.ask("cold", TOKENS, sampling=sampling)
        again = served.ask("again", TOKENS, sampling=sampling, cache_use=use)
    assert cold.tokens == again.tokens
    reads = use in (CacheUse.READ_WRITE, CacheUse.READ_ONLY)
    assert (again.cache.cached_token_count > 0) is reads


def test_two_tenants_never_meet(tmp_path: Path, llama: Path) -> None:
    one, two = Tenant("one"), Tenant("two")
    with CacheServer(llama, tmp_path) as served:
        served.ask("one", TOKENS, tenant=one)
        assert served.ask("two", TOKENS, tenant=two).cache.limit is ReuseLimit.NO_MATCH
    with CacheServer(llama, tmp_path) as served:
        assert served.ask("nobody", TOKENS).cache.limit is ReuseLimit.NO_MATCH
        assert served.ask("one", TOKENS, tenant=one).cache.ssd_token_count == len(TOKENS) - 1


def test_two_models_with_one_tokenizer_in_one_directory(tmp_path: Path) -> None:
    folders = [tiny_model_dir(tmp_path, "llama", seed=seed, name=f"model{seed}") for seed in (0, 1)]
    cold = []
    for folder in folders:
        with CacheServer(folder, tmp_path / "blocks") as served:
            answer = served.ask("cold", TOKENS)
            assert answer.cache.limit is ReuseLimit.NO_MATCH
            cold.append(answer.tokens)
    assert cold[0] != cold[1]
    for folder, tokens in zip(folders, cold, strict=True):
        with CacheServer(folder, tmp_path / "blocks") as served:
            answer = served.ask("warm", TOKENS)
            _, stats = served.stats()
        assert answer.tokens == tokens and answer.cache.ssd_token_count == len(TOKENS) - 1
        assert stats.disk is not None and stats.disk.other_model_block_count == stats.ssd.block_count


def test_a_model_quantized_anew_in_place_sees_nothing_of_the_old(tmp_path: Path) -> None:
    limits = []
    for bits in (8, 4):
        folder = tiny_model_dir(tmp_path, "llama", name="model", quantize_bits=bits)
        with CacheServer(folder, tmp_path / "blocks") as served:
            limits.append(served.ask("a", TOKENS).cache.limit)
    assert limits == [ReuseLimit.NO_MATCH, ReuseLimit.NO_MATCH]
