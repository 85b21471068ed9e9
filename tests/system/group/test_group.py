"""A group of two ranks: the text of one process, from every tier, after restarts, losses and lies."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.bootstrap.encryption import new_key_text
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.group.follower import Follower

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.configs import SHARDED
from tests.fixtures.patience import BOUND_S
from tests.fixtures.whole_server import whole_server
from tests.system.group.rank_group import BLOCK, RankGroup, question

pytestmark = pytest.mark.group

OF_THREE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
PROMPTS = tuple(tuple((31 * n + 7 * i) % 90 + 5 for i in range(40 + 35 * n)) for n in range(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def alone(folder: Path, directory: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Return what one process says to each prompt."""

    async def ask() -> list[list[int]]:
        async with whole_server(folder, directory) as served:
            answers = [await served.inference.Generate(question(prompt)) for prompt in prompts]
        return [list(answer.token_ids) for answer in answers]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def said(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one process says to each prompt."""
    return alone(folder, tmp_path_factory.mktemp("alone"))


@pytest.fixture
def group(folder: Path, tmp_path: Path) -> Iterator[RankGroup]:
    with RankGroup(folder, tmp_path) as started:
        started.serving.wait_until_serving()
        yield started


def tokens(group: RankGroup) -> list[list[int]]:
    return [list(group.ask(prompt).token_ids) for prompt in PROMPTS]


@pytest.mark.parametrize("architecture", SHARDED)
def test_a_group_says_what_one_process_says_from_every_tier(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    expected = alone(folder, tmp_path / "alone")
    with RankGroup(folder, tmp_path) as group:
        group.serving.wait_until_serving()
        assert tokens(group) == expected
        assert group.ask(PROMPTS[-1]).cache.ram_tokens > 0
        assert tokens(group) == expected
        group.restart()
        assert group.ask(PROMPTS[-1]).cache.ssd_tokens > 0
        assert tokens(group) == expected


def test_three_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", **OF_THREE)
    expected = alone(folder, tmp_path / "alone")
    with RankGroup(folder, tmp_path, world=3) as group:
        group.serving.wait_until_serving()
        assert tokens(group) == expected
        group.ranks[2].kill()
        assert all(process.wait() != 0 for process in group.ranks)
        group.start()
        group.serving.wait_until_serving()
        assert tokens(group) == expected


def test_heads_that_the_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", **OF_THREE)
    with RankGroup(folder, tmp_path) as group:
        assert all(process.wait() != 0 for process in group.ranks)
    for rank in (0, 1):
        assert "self_attn.n_kv_heads is 3; its heads and widths must be multiples" in group.log(rank)


def key_file(path: Path) -> tuple[str, str]:
    """Write a new key; return the option that names it."""
    path.write_text(new_key_text())
    path.chmod(0o600)
    return "--cache-key-file", str(path)


def test_encrypted_blocks_are_read_again_on_every_rank(
    folder: Path, said: list[list[int]], tmp_path: Path
) -> None:
    with RankGroup(folder, tmp_path, options=key_file(tmp_path / "key")) as group:
        group.serving.wait_until_serving()
        assert tokens(group) == said
        group.restart()
        assert group.ask(PROMPTS[-1]).cache.ssd_tokens > 0
        assert tokens(group) == said
        group.stop()
        for rank in (0, 1):
            files = list(group.directory(rank).rglob("*.safetensors"))
            assert files and not any(b"token_ids" in file.read_bytes() for file in files)


def test_a_rank_with_another_key_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    options = {rank: key_file(tmp_path / f"key-{rank}") for rank in (0, 1)}
    with RankGroup(folder, tmp_path, rank_options=options) as group:
        assert group.ranks[1].wait() != 0
        assert "rank 1 does not fit: the key of the cache is" in group.log(1)


def test_each_rank_stores_its_part(
    group: RankGroup, folder: Path, said: list[list[int]], tmp_path: Path
) -> None:
    assert tokens(group) == said
    group.stop()
    files = [sorted(group.directory(rank).rglob("*.safetensors")) for rank in (0, 1)]
    assert [file.name for file in files[0]] == [file.name for file in files[1]] != []
    sizes = [sum(file.stat().st_size for file in each) for each in files]
    assert sizes[0] == sizes[1]
    content = [file.read_bytes() for each in files for file in each]
    assert len(set(content)) == len(content)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_directory_costs_recomputation_alone(
    group: RankGroup, said: list[list[int]], rank: int
) -> None:
    assert tokens(group) == said
    group.stop()
    shutil.rmtree(group.directory(rank))
    group.start()
    group.serving.wait_until_serving()
    first = group.ask(PROMPTS[-1])
    assert list(first.token_ids) == said[-1] and first.cache.cached_tokens == 0
    group.restart()
    assert group.ask(PROMPTS[-1]).cache.ssd_tokens > 0
    assert tokens(group) == said


@pytest.mark.parametrize("rank", [0, 1])
def test_damaged_blocks_of_one_rank_are_computed_again(
    group: RankGroup, said: list[list[int]], rank: int
) -> None:
    assert tokens(group) == said
    group.stop()
    for file in group.directory(rank).rglob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    group.start()
    group.serving.wait_until_serving()
    assert tokens(group) == said
    assert tokens(group) == said
    group.restart()
    assert tokens(group) == said


def test_blocks_of_another_rank_are_not_taken(group: RankGroup, said: list[list[int]]) -> None:
    assert tokens(group) == said
    group.stop()
    for source, target in ((0, "aside"), (1, "blocks-0")):
        shutil.move(group.directory(source), group.directory(0).parent / target)
    shutil.move(group.directory(0).parent / "aside", group.directory(1))
    group.start()
    group.serving.wait_until_serving()
    first = group.ask(PROMPTS[-1])
    assert list(first.token_ids) == said[-1] and first.cache.cached_tokens == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_callers_are_told_that_a_rank_is_gone_and_the_group_comes_back_warm(
    group: RankGroup, said: list[list[int]], rank: int
) -> None:
    assert tokens(group) == said
    group.restart()
    with group.stub() as stub:
        stream = stub.Stream(question(PROMPTS[0], count=2000), timeout=BOUND_S)
        while next(stream).WhichOneof("event") != "delta":
            pass
        group.ranks[rank].kill()
        with pytest.raises(grpc.RpcError) as refused:
            for _ in stream:
                pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert all(process.wait() != 0 for process in group.ranks)
    group.start()
    group.serving.wait_until_serving()
    assert group.ask(PROMPTS[-1]).cache.ssd_tokens > 0
    assert tokens(group) == said


def test_ranks_have_as_many_pages_as_the_one_with_the_least_memory(
    folder: Path, said: list[list[int]], tmp_path: Path
) -> None:
    least = {1: ("--memory-limit-bytes", str(int(0.99 * (1 << 30))))}
    with RankGroup(folder, tmp_path, rank_options=least) as group:
        group.serving.wait_until_serving()
        assert tokens(group) == said
    logs = [group.log(rank).splitlines() for rank in (0, 1)]
    pools = [[line.split()[2:] for line in log if "page_pool_replaced" in line] for log in logs]
    assert pools[0] == pools[1] != []


def test_rows_decode_together(group: RankGroup, said: list[list[int]]) -> None:
    with group.stub() as stub:
        calls = [
            stub.Generate.future(question(prompt), timeout=BOUND_S) for prompt in PROMPTS for _ in range(4)
        ]
        answers = [list(call.result().token_ids) for call in calls]
    assert answers == [expected for expected in said for _ in range(4)]
    group.stop()
    (line,) = [line for line in group.log(0).splitlines() if "group_ended" in line]
    facts = dict(part.split("=") for part in line.split() if "=" in part)
    assert int(facts["bytes"]) / int(facts["passes"]) <= 4096


def test_what_one_server_does_holds_for_a_group(group: RankGroup, folder: Path, tmp_path: Path) -> None:
    def asked(**fields: object) -> messages.GenerateRequest:
        request = question(PROMPTS[1])
        request.MergeFrom(messages.GenerateRequest(**fields))
        return request

    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    requests = [
        asked(sampling={"temperature": 1.0, "seed": 7, "top_p": 0.9}),
        asked(sampling={"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3, "top_k": 20}),
        asked(speculation={"prompt_lookup": {}}),
        asked(logprobs={"top_count": 2, "prompt": True}),
        asked(response_format={"json_schema": schema}, max_output_tokens=40),
        asked(completions=3, sampling={"temperature": 1.0, "seed": 3}),
    ]

    async def ask() -> list[messages.GenerateResponse]:
        async with whole_server(folder, tmp_path / "alone") as served:
            return [await served.inference.Generate(request) for request in requests]

    expected = asyncio.run(ask())
    with group.stub() as stub:
        answers = [stub.Generate(request, timeout=BOUND_S) for request in requests]
    for answer, one in zip(answers, expected, strict=True):
        assert list(answer.token_ids) == list(one.token_ids)
        assert answer.text == one.text
        assert [c.text for c in answer.completions] == [c.text for c in one.completions]
        assert len(answer.prompt_logprobs) == len(one.prompt_logprobs)
    for ours, theirs in zip(answers[3].prompt_logprobs, expected[3].prompt_logprobs, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_rank_with_another_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = tiny_model_dir(tmp_path, "llama", seed=5)
    with RankGroup([folder, other], tmp_path) as group:
        assert group.ranks[1].wait() != 0
        assert "rank 1 does not fit: the model is" in group.log(1)


def feed_one_token_less() -> None:
    """Plant a fault: this rank forgets one sequence's last token once."""
    carried_out = Follower._do_release

    def forget(self: Follower, order: object) -> None:
        if self.pass_count < 5:
            carried_out(self, order)  # type: ignore[arg-type]

    Follower._do_release = forget  # type: ignore[method-assign]


def test_a_rank_that_knows_something_else_ends_the_group(folder: Path, tmp_path: Path) -> None:
    with RankGroup(folder, tmp_path, break_rank={1: feed_one_token_less}) as group:
        group.serving.wait_until_serving()
        group.ask(PROMPTS[0])
        with pytest.raises(grpc.RpcError) as refused:
            group.ask(PROMPTS[1])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "disagrees" not in str(refused.value)
        assert all(process.wait() != 0 for process in group.ranks)
    assert "disagrees with rank 0 about pass" in group.log(0)


def compute_something_else() -> None:
    """Plant a fault: this rank's last norm is not what it should be."""
    shard = Rank.shard

    def damage(self: Rank, model: Any, **options: Any) -> int:
        whole_count = shard(self, model, **options)
        model.model.norm.weight = 1.5 * model.model.norm.weight
        return whole_count

    Rank.shard = damage  # type: ignore[method-assign]


def test_a_rank_that_computes_something_else_ends_the_group(folder: Path, tmp_path: Path) -> None:
    with RankGroup(folder, tmp_path, break_rank={1: compute_something_else}) as group:
        group.serving.wait_until_serving()
        with pytest.raises(grpc.RpcError) as refused:
            group.ask(PROMPTS[1], count=200)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert all(process.wait() != 0 for process in group.ranks)
    assert "the ranks' logits differ by 0." in group.log(0)


def test_a_group_drains_what_runs(group: RankGroup) -> None:
    with group.stub() as stub:
        stream = stub.Stream(question(PROMPTS[0], count=60), timeout=BOUND_S)
        next(stream)
        group.serving.terminate()
        kinds = [event.WhichOneof("event") for event in stream]
    assert kinds[-1] == "finished"
    assert [process.wait() for process in group.ranks] == [0, 0]
    stored = len(list(group.directory(1).rglob("*.safetensors")))
    assert stored >= (len(PROMPTS[0]) + 60) // BLOCK
