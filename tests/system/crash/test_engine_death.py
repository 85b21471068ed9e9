"""An exception in a real server's inference loop: INTERNAL, NOT_SERVING, and an exit code that tells."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2 as pb
from icehouse.v1 import inference_service_pb2_grpc as pb_grpc
from icehouse.v1 import prompt_pb2
from icehouse_server.engine.runner.runner import ModelRunner

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess

_RUN = ModelRunner.run
_GOOD_STEPS = 5


def break_the_sixth_pass() -> None:
    """Runs in the server's process: a pass that only decodes for the first real request raises."""
    steps = iter(range(_GOOD_STEPS))

    def run(self, chunks, *, before_wait=None, reads_at_once=False):
        if not chunks and next(steps, None) is None:
            raise RuntimeError("injected secret detail")
        return _RUN(self, chunks, before_wait=before_wait)

    ModelRunner.run = run  # type: ignore[method-assign]


def test_open_calls_fail_health_turns_and_the_process_ends_with_a_code(tmp_path: Path) -> None:
    model, log = tiny_model_dir(tmp_path, "llama"), tmp_path / "log"
    with ServerProcess(
        model=model, directory=tmp_path / "blocks", log=log, break_it=break_the_sixth_pass
    ) as server:
        server.wait_until_serving()
        with grpc.insecure_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), timeout=BOUND_S
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            request = pb.GenerateRequest(
                prompt={"tokens": prompt_pb2.TokenPrompt(ids=[5, 6, 7])}, max_output_tokens=100
            )
            with pytest.raises(grpc.RpcError) as failed:
                pb_grpc.InferenceServiceStub(channel).Generate(request, timeout=BOUND_S)
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in failed.value.details(), "no inner message reaches a caller"
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.wait() not in (0, None)
    assert "injected secret detail" in log.read_text(), "the log has what the caller may not see"
