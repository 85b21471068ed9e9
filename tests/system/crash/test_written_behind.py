"""kill -9 after a turn, once the disk had time: each complete block of it is there at the next start."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
from icehouse.v1 import inference_service_pb2 as pb
from icehouse.v1 import inference_service_pb2_grpc, prompt_pb2

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.cache.test_reuse import prompt
from tests.system.crash.crashing_server import ServerProcess

_BLOCK = 16
_OPTIONS = ("--block-token-count", str(_BLOCK), "--min-prefix-token-count", "0", "--no-restore-or-recompute")


def _turn(stub: inference_service_pb2_grpc.InferenceServiceStub, tokens: list[int]) -> pb.GenerateResponse:
    request = pb.GenerateRequest(
        prompt={"tokens": prompt_pb2.TokenPrompt(ids=tokens)}, max_output_tokens=40, session_id="agent-7"
    )
    return stub.Generate(request, timeout=BOUND_S)


def test_a_turn_outlives_kill_once_nothing_waits(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "models", "llama")
    directory, first = tmp_path / "blocks", prompt(5 * _BLOCK + 3)
    with ServerProcess(model=model, directory=directory, log=tmp_path / "1.log", options=_OPTIONS) as server:
        server.wait_until_serving()
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            said = _turn(stub, first)
            end_time = time.monotonic() + BOUND_S
            while (spill := stub.CacheStats(pb.CacheStatsRequest()).cache.spill).behind_waiting_count:
                assert time.monotonic() < end_time, spill
        server.kill()
    second = [*first, *said.token_ids]
    complete_count = (len(second) - 1) // _BLOCK
    assert spill.policy == "write_behind" and spill.behind_block_total == complete_count > 5
    with ServerProcess(model=model, directory=directory, log=tmp_path / "2.log", options=_OPTIONS) as server:
        server.wait_until_serving()
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            again = _turn(stub, second)
    assert again.cache.ssd_tokens == complete_count * _BLOCK and again.cache.ram_tokens == 0
