"""A model of the hub that is not on disk: fetched for its first request, which is told; or why it is not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2_grpc, model_service_pb2_grpc
from icehouse.v1 import model_service_pb2 as models

from bench.server_process import free_ports
from tests.fixtures.hub import HUB_ID, environment_of, hub_of
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.models.pool_server import question

PROMPT = (5, 6, 7)


@contextlib.contextmanager
def serving(folder: Path, endpoint: str, *names: str) -> Iterator[grpc.Channel]:
    """Serve a small model, and these, in a process of its own."""
    with started(folder, endpoint, *names) as (_, channel):
        yield channel


@contextlib.contextmanager
def started(
    folder: Path, endpoint: str, *names: str
) -> Iterator[tuple[subprocess.Popen[bytes], grpc.Channel]]:
    """Start such a process."""
    small = tiny_model_dir(folder, "llama", name="small")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "icehouse_server.cli.main", "serve", str(small), *names]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--no-ssd", "--no-preload"],
            env=environment_of(folder, endpoint),
            stdout=log,
            stderr=log,
        )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield process, channel
    finally:
        process.kill()
        process.wait()


def state_of(channel: grpc.Channel, name: str) -> models.Model:
    stub = model_service_pb2_grpc.ModelServiceStub(channel)
    answer = stub.GetModel(models.GetModelRequest(model=name), timeout=BOUND_S, wait_for_ready=True)
    found: models.Model = answer.model
    return found


def test_a_request_waits_for_the_download_and_whoever_leaves_does_not_end_it(tmp_path: Path) -> None:
    shown = tiny_model_dir(tmp_path, "qwen3", name="shown")
    files = {path.name: path.read_bytes() for path in shown.iterdir()}
    opened = threading.Event()
    with (
        hub_of(files, opened=opened) as endpoint,
        serving(tmp_path, endpoint, HUB_ID, str(shown)) as channel,
    ):
        inference: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        asked = question(HUB_ID, PROMPT, output_count=2)
        try:
            left = inference.Stream(asked, timeout=BOUND_S, wait_for_ready=True)
            told = next(left)
            assert told.loading_model.model == HUB_ID
            while told.loading_model.state != models.MODEL_STATE_FETCHING:
                told = next(left)
            left.cancel()
            assert state_of(channel, HUB_ID).state == models.MODEL_STATE_FETCHING
            waiting = inference.Generate.future(asked, timeout=BOUND_S)
            # Another model is loaded meanwhile.
            assert inference.Generate(question("shown", PROMPT, output_count=2), timeout=BOUND_S).token_ids
            assert state_of(channel, HUB_ID).state == models.MODEL_STATE_FETCHING
        finally:
            opened.set()
        answer = waiting.result()
        assert len(answer.token_ids) == 2 and answer.HasField("load_duration")
        assert state_of(channel, HUB_ID).state == models.MODEL_STATE_READY


def test_a_server_that_stops_in_a_download_ends(tmp_path: Path) -> None:
    shown = tiny_model_dir(tmp_path, "qwen3", name="shown")
    files = {path.name: path.read_bytes() for path in shown.iterdir()}
    opened = threading.Event()
    with hub_of(files, opened=opened) as endpoint, started(tmp_path, endpoint, HUB_ID) as (process, channel):
        inference: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        asking = inference.Stream(question(HUB_ID, PROMPT), timeout=BOUND_S, wait_for_ready=True)
        try:
            while next(asking).loading_model.state != models.MODEL_STATE_FETCHING:
                pass
            process.terminate()
            with pytest.raises(grpc.RpcError) as refused:
                list(asking)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            process.wait(BOUND_S)
        finally:
            opened.set()


def test_files_are_fetched_ahead_without_loading_the_model(tmp_path: Path) -> None:
    shown = tiny_model_dir(tmp_path, "qwen3", name="shown")
    files = {path.name: path.read_bytes() for path in shown.iterdir()}
    opened = threading.Event()
    with hub_of(files, opened=opened) as endpoint, serving(tmp_path, endpoint, HUB_ID) as channel:
        stub: Any = model_service_pb2_grpc.ModelServiceStub(channel)
        inference: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        asked = models.LoadModelRequest(model=HUB_ID, fetch_only=True)
        try:
            fetching = stub.LoadModel(asked, timeout=BOUND_S, wait_for_ready=True)
            assert next(fetching).progress.state == models.MODEL_STATE_FETCHING
            # Others are served and loaded meanwhile.
            assert inference.Generate(question("", PROMPT, output_count=2), timeout=BOUND_S).token_ids
            other = models.LoadModelRequest(model="small")
            assert list(stub.LoadModel(other, timeout=BOUND_S))[-1].done.state == models.MODEL_STATE_READY
        finally:
            opened.set()
        assert list(fetching)[-1].done.state == models.MODEL_STATE_ABSENT
        answer = inference.Generate(question(HUB_ID, PROMPT, output_count=2), timeout=BOUND_S)
        assert len(answer.token_ids) == 2
    with serving(tmp_path / "again", "http://127.0.0.1:1", HUB_ID) as channel:
        stub = model_service_pb2_grpc.ModelServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.LoadModel(asked, timeout=BOUND_S, wait_for_ready=True))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("name", "is_there", "why"),
    [
        ("org/other", True, "the hub has no model org/other"),
        (HUB_ID, False, "the hub cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_and_the_log_says_why(
    tmp_path: Path, name: str, is_there: bool, why: str
) -> None:
    with hub_of({}) as endpoint:
        reached = endpoint if is_there else "http://127.0.0.1:1"
        with serving(tmp_path, reached, name) as channel:
            inference: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                inference.Generate(question(name, PROMPT), timeout=BOUND_S, wait_for_ready=True)
            refusal: Any = caught.value
            assert refusal.code() is grpc.StatusCode.UNAVAILABLE and "MODEL_NOT_FOUND" in refusal.details()
            found = state_of(channel, name)
            assert found.state == models.MODEL_STATE_FAILED and "MODEL_NOT_FOUND" in found.state_detail
            # The other one is served.
            assert inference.Generate(question("small", PROMPT), timeout=BOUND_S).token_ids
        assert why in (tmp_path / "log").read_text()
