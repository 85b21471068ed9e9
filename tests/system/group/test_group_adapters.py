"""LoRA adapters of a group: each request gets the text that one process gives it, from every tier."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import inference_service_pb2 as messages

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.adapters import tiny_adapter_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.whole_server import whole_server
from tests.system.group.rank_group import RankGroup, question

pytestmark = pytest.mark.group

NAMES = ("", "one", "two")
PROMPTS = tuple(tuple((29 * n + 11 * i) % 90 + 5 for i in range(40 + 35 * n)) for n in range(2))


def questions() -> list[messages.GenerateRequest]:
    """Return each prompt with every adapter: what is shared by mistake is met at once. Rank 0 alone draws, so
    that its graph of a pass is another one than the others'."""
    asked = []
    for seed, prompt in enumerate(PROMPTS):
        for name in NAMES:
            request = question(prompt, count=24)
            request.prompt.adapter = name
            request.sampling.temperature = 0.5
            request.sampling.seed = seed
            asked.append(request)
    return asked


def alone(folder: Path, directory: Path, **settings: Any) -> list[list[int]]:
    """Return what one process says to each question."""
    asked = questions() if "model__adapters" in settings else [question(prompt) for prompt in PROMPTS]

    async def ask() -> list[list[int]]:
        async with whole_server(folder, directory, **settings) as served:
            answers = [await served.inference.Generate(request) for request in asked]
        return [list(answer.token_ids) for answer in answers]

    return asyncio.run(ask())


def told(group: RankGroup) -> list[list[int]]:
    """Return what the group says to each question, all of them asked at once."""
    with group.stub() as stub:
        calls = [stub.Generate.future(request, timeout=BOUND_S) for request in questions()]
        return [list(call.result().token_ids) for call in calls]


def adapters_of(folder: Path, parent: Path, *kinds: str) -> str:
    """Write an adapter of each kind and return the setting that names them."""
    paths = [
        tiny_adapter_dir(parent, folder, seed=seed, kind=kind) for seed, kind in enumerate(kinds, start=1)
    ]
    return ",".join(f"{name}={path}" for name, path in zip(NAMES[1:], paths, strict=True))


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_each_adapter_says_what_one_process_says_from_every_tier(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    adapters = adapters_of(folder, tmp_path, "lora", "full" if architecture == "llama" else "lora")
    expected = alone(folder, tmp_path / "alone", model__adapters=adapters)
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the adapters change the text"
    with RankGroup(folder, tmp_path, options=("--adapters", adapters)) as group:
        group.serving.wait_until_serving()
        assert told(group) == expected
        assert told(group) == expected
        group.restart()
        with group.stub() as stub:
            last = stub.Generate(questions()[-1], timeout=BOUND_S)
        assert list(last.token_ids) == expected[-1] and last.cache.ssd_tokens > 0
        assert told(group) == expected


@pytest.mark.parametrize("bits", [None, 4])
def test_an_adapter_for_every_request_says_what_one_process_says(bits: int | None, tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", quantize_bits=bits, intermediate_size=128)
    path = tiny_adapter_dir(tmp_path, folder, seed=1)
    expected = alone(folder, tmp_path / "alone", model__adapter_path=str(path))
    assert expected != alone(folder, tmp_path / "bare")
    with RankGroup(folder, tmp_path, options=("--adapter-path", str(path))) as group:
        group.serving.wait_until_serving()
        assert [list(group.ask(prompt).token_ids) for prompt in PROMPTS] == expected


def test_a_rank_with_another_adapter_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    options = {
        rank: ("--adapters", f"one={tiny_adapter_dir(tmp_path, folder, seed=rank + 1)}") for rank in (0, 1)
    }
    with RankGroup(folder, tmp_path, rank_options=options) as group:
        assert group.ranks[1].wait() != 0
        assert "rank 1 does not fit: model.adapters is one=" in group.log(1)


@pytest.mark.parametrize("option", ["--adapters", "--adapter-path"])
def test_dora_is_refused_with_the_reason(option: str, tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    path = tiny_adapter_dir(tmp_path, folder, seed=1, kind="dora")
    value = f"one={path}" if option == "--adapters" else str(path)
    with RankGroup(folder, tmp_path, options=(option, value)) as group:
        assert all(process.wait() != 0 for process in group.ranks)
    for rank in (0, 1):
        assert "is a DoRA adapter, which needs the norms of whole rows" in group.log(rank)
