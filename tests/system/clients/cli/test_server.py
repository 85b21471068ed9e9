"""`icehouse models`, `info`, `stats`, `requests`, `cancel`: a server's facts for people and as JSON.

`icehouse health`: exit codes that a container's probe can go by.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as inference
from icehouse_server.config import SecurityConfig
from icehouse_server.domain.model import PassSplit

from tests.fixtures.rpc.authority import Authority
from tests.fixtures.rpc.fake_engine import MODEL_INFO, hanging
from tests.fixtures.terminal import invoke, written
from tests.unit.rpc.conftest import RunningServer, running


async def test_models_tells_what_is_served(served: RunningServer) -> None:
    told = await invoke("models", "--address", served.server.address)
    facts = json.loads((await invoke("models", "--json", "--address", served.server.address)).stdout)
    assert told.exit_code == 0, told.output
    for words in ("tiny", "llama, float32, quantization none", "64 tokens", "128 bytes a token", "abababab"):
        assert words in told.stdout, words
    assert [model["id"] for model in facts["models"]] == ["tiny"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, ("images no", "passes not known")),
        (
            {"sees_images": True, "pass_splits": (PassSplit.ATTENTION, PassSplit.MODULE)},
            ("images yes\n", "passes shared, split at attention and module"),
        ),
        (
            {"sees_images": True, "runs_images_whole": True, "pass_splits": (PassSplit.ALONE,)},
            ("images yes, each in one pass", "passes one per sequence"),
        ),
    ],
)
async def test_models_tells_what_a_pass_may_hold(facts: dict[str, Any], words: tuple[str, str]) -> None:
    async with running(info=dataclasses.replace(MODEL_INFO, **facts)) as served:
        told = await invoke("models", "--address", served.server.address)
    shown = re.sub(" +", " ", told.stdout)
    assert all(each in shown.replace(" \n", "\n") for each in words), shown


async def test_info_tells_version_features_and_limits(served: RunningServer) -> None:
    told = await invoke("info", "--address", served.server.address)
    facts = json.loads((await invoke("info", "--json", "--address", served.server.address)).stdout)
    for words in ("ready", "prefix cache, ssd cache", "max_completions", "32,768"):
        assert words in told.stdout, told.output
    assert facts["limits"]["max_completions"] == 16


async def test_stats_are_those_of_top(served: RunningServer) -> None:
    told = await invoke("stats", "--address", served.server.address)
    facts = json.loads((await invoke("stats", "--json", "--address", served.server.address)).stdout)
    line = await invoke("top", "--once", "--json", "--address", served.server.address)
    assert "decoding" in told.stdout and "slowest" in told.stdout
    assert facts["engine"]["step_total"] == "7"
    assert json.loads(line.stdout)["engine"]["step_total"] == "7"


async def test_requests_are_listed_and_ended(served: RunningServer) -> None:
    served.engine.script = hanging
    address = ("--address", served.server.address)
    nothing = await invoke("requests", *address)
    call = served.inference.Stream(
        inference.GenerateRequest(prompt={"text": "ab"}, request_id="r1", max_output_tokens=9)
    )
    while (await call.read()).WhichOneof("event") != "delta":
        pass
    listed, facts = await invoke("requests", *address), await invoke("requests", "--json", *address)
    ended, again = await invoke("cancel", "r0", "r1", *address), await invoke("cancel", "r1", *address)
    assert (nothing.exit_code, nothing.stdout) == (
        0,
        "",
    ) and "no requests waiting or running" in nothing.stderr
    assert listed.stdout.splitlines()[1].split()[:3] == ["r1", "Stream", "decoding"]
    assert "1 of 9" in listed.stdout
    assert json.loads(facts.stdout)["requests"][0]["request_id"] == "r1"
    assert (ended.exit_code, ended.stdout) == (1, "ended r1\n") and "no request 'r0' of yours" in ended.stderr
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await asyncio.sleep(0)
    assert again.exit_code == 1 and "no request 'r1' of yours" in again.stderr


async def test_a_server_that_loads_is_told_from_one_that_is_not_there() -> None:
    async with running(ready=False) as loading:
        models = await invoke("models", "--address", loading.server.address)
        info = await invoke("info", "--address", loading.server.address)
    nobody = await invoke("models", "--address", "127.0.0.1:1")
    assert models.exit_code == 1 and "UNAVAILABLE: the model is loading" in models.stderr
    assert info.exit_code == 0 and "loading" in info.stdout
    assert nobody.exit_code == 1 and "no server answers at 127.0.0.1:1" in nobody.stderr


async def test_a_server_that_serves_is_0_and_one_that_loads_is_1() -> None:
    async with running() as served:
        ready = await invoke("health", "--address", served.server.address)
    async with running(ready=False) as served:
        loading = await invoke("health", "--address", served.server.address)
    nobody = await invoke("health", "--address", "127.0.0.1:1")
    assert (ready.exit_code, ready.stdout) == (0, "SERVING\n")
    assert (loading.exit_code, loading.stdout) == (1, "NOT_SERVING\n")
    assert nobody.exit_code == 1 and "no server answers" in nobody.output


async def test_a_server_with_tls_and_tokens_is_asked_without_a_token(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.write_server(tmp_path)
    ca = written(tmp_path, "ca.pem", authority.pem)
    written(tmp_path, "tokens", b"sha256=" + b"0" * 64 + b" tenant=a\n")
    security = SecurityConfig(
        tls_certificate=str(certificate), tls_key=str(key), token_file=str(tmp_path / "tokens")
    )
    async with running(security=security) as served:
        environ = {"ICEHOUSE_CLIENT_ADDRESS": served.server.address, "ICEHOUSE_CLIENT_CA": ca}
        asked = await invoke("health", environ=environ)
        plain = await invoke("health", "--address", served.server.address)
    assert (asked.exit_code, asked.stdout) == (0, "SERVING\n"), asked.output
    assert plain.exit_code == 1 and "needs --ca" in plain.output
