"""Several models behind the front: all are listed, and a request reaches the one that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from icehouse.v1.model_service_pb2 import Model
from icehouse_http.chat.request import asked_of
from icehouse_http.fields import Fields
from icehouse_http.settings import Settings
from icehouse_http.upstream import Target
from icehouse_server.config.setting import NamedPath

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.adapters import tiny_adapter_dir
from tests.system.models.pool_server import entry, pool_server
from tests.unit.rpc.access.test_tokens import ADS, SEARCH, line, write


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


async def test_each_caller_knows_only_the_models_that_it_may_use(tmp_path: Path) -> None:
    write(tokens := tmp_path / "tokens", line(SEARCH, "search"), line(ADS, "ads"))
    entries = [
        entry(tiny_model_dir(tmp_path, "llama"), tenants=("search",)),
        entry(tiny_model_dir(tmp_path, "qwen3"), tenants=("ads",)),
    ]
    security = {"security__token_file": str(tokens)}
    async with pool_server(tmp_path / "blocks", entries, **security) as served:
        for is_strict in (False, True):
            async with front_of(served.address, strict_models=is_strict) as front:
                for token, own, other in 2 * ((SEARCH, "llama", "qwen3"), (ADS, "qwen3", "llama")):
                    assert (await completed(front, own, token))["model"] == own
                    answer = await completed(front, other, token)
                    if is_strict:
                        assert answer["error"]["code"] == "model_not_found"
                        assert own in answer["error"]["message"].partition(";")[2]
                        assert other not in answer["error"]["message"].partition(";")[2]
                    else:
                        assert answer["model"] == own


async def test_an_adapter_of_a_model_that_was_never_loaded_can_be_named(tmp_path: Path) -> None:
    two = tiny_model_dir(tmp_path, "qwen3")
    adapter = tiny_adapter_dir(tmp_path, two, seed=1)
    entries = [
        entry(tiny_model_dir(tmp_path, "llama")),
        entry(two, adapters=(NamedPath("mine", str(adapter)),)),
    ]
    async with (
        pool_server(tmp_path / "blocks", entries) as served,
        front_of(served.address, aliases={"gpt-5": "mine"}) as front,
    ):
        listed = (await front.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [
            ("llama", "llama"),
            ("qwen3", "qwen3"),
            ("mine", "qwen3"),
            ("gpt-5", "qwen3"),
        ]
        # Clients take a number for the truth, and nothing is known yet.
        assert [model["max_model_len"] for model in listed] == [4096, None, None, None]
        answer = await completed(front, "gpt-5")
        assert answer["model"] == "qwen3"
        assert answer["system_fingerprint"] != (await completed(front, "qwen3"))["system_fingerprint"]


async def completed(front: HttpFront, model: str, token: str = "") -> dict[str, Any]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    body = {"model": model, "prompt": "w5 w6 w7", "max_tokens": 2}
    answer: dict[str, Any] = (await front.http.post("/v1/completions", json=body, headers=headers)).json()
    return answer


async def test_reasoning_is_limited_where_it_is_not_known_whether_a_model_can_be(tmp_path: Path) -> None:
    asked = Fields({"reasoning_effort": "low", "messages": [{"role": "user", "content": "Hi"}]})
    options = asked_of(asked, Target(Model(id="qwen3")), {}, Settings()).options
    assert options["max_reasoning_tokens"] == 2048
    entries = [entry(tiny_model_dir(tmp_path, name)) for name in ("llama", "qwen3")]
    async with pool_server(tmp_path / "blocks", entries) as served, front_of(served.address) as front:
        # It cannot, which shows when it is loaded.
        answer = await front.openai.chat.completions.create(
            model="qwen3", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, reasoning_effort="low"
        )
        assert answer.model == "qwen3"
