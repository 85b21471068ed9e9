"""Several models behind the front: all are listed, and a request reaches the one that it names."""

from __future__ import annotations

from pathlib import Path

from clients.http.tests.fronts import front_of
from tests.fixtures.models import tiny_model_dir
from tests.system.models.pool_server import entry, pool_server


async def test_all_are_listed_with_their_aliases_and_answer_by_name(tmp_path: Path) -> None:
    one = tiny_model_dir(tmp_path, "llama")
    two = tiny_model_dir(tmp_path, "qwen3")
    entries = [entry(one), entry(two, aliases=("gpt-4o",))]
    async with pool_server(tmp_path / "blocks", entries) as served, front_of(served.address) as front:
        listed = [model.id async for model in await front.openai.models.list()]
        assert listed == ["llama", "qwen3", "gpt-4o"]
        for name, wanted in (("qwen3", "qwen3"), ("gpt-4o", "qwen3"), ("llama", "llama"), ("other", "llama")):
            answer = await front.openai.completions.create(model=name, prompt="w5 w6 w7", max_tokens=2)
            assert answer.usage is not None and answer.usage.completion_tokens == 2
            assert (await served.last_model()) == wanted
