"""Which worker gets what, and who is hurt when one is full, left or killed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as native
from icehouse.v1 import inference_service_pb2_grpc, sampling_pb2

from tests.system.fleet.conftest import BLOCK, LONG, MODEL, Fleet, fleet_of, until

pytestmark = pytest.mark.fleet

TURN_COUNT = 5


def counts(fleet: Fleet, port: int) -> tuple[int, int]:
    """Return how many requests of a worker run, and how many wait."""
    stats = fleet.stats(port)
    return stats.decoding_count, stats.waiting_count


def test_five_turns_stay_with_their_worker(fleet: Fleet) -> None:
    before = fleet.accepted()
    client, said, cached = fleet.openai(), [], []
    for turn in range(TURN_COUNT):
        said.append({"role": "user", "content": f"Turn {turn}: and what happened then to the brown fox?"})
        answer = client.chat.completions.create(model=MODEL, messages=said, max_tokens=8, temperature=0)
        said.append({"role": "assistant", "content": answer.choices[0].message.content})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    taken = [count - before[port] for port, count in fleet.accepted().items()]
    assert sorted(taken) == [0, TURN_COUNT]
    # Each turn begins with the whole of the one before, but for its reply as the template spells it.
    assert all(later >= earlier + BLOCK for earlier, later in itertools.pairwise(cached))


def test_a_client_that_leaves_ends_its_request_on_the_worker(fleet: Fleet) -> None:
    before = {port: fleet.stats(port).cancelled_total for port in fleet.workers}
    fleet.streamed("Somebody who will not wait for the end").close()
    until(lambda: sum(fleet.stats(p).cancelled_total - before[p] for p in fleet.workers) == 1)
    assert [fleet.stats(port).decoding_count for port in fleet.workers] == [0, 0]


def test_what_a_full_worker_refuses_the_other_takes(tmp_path: Path) -> None:
    options = ("--decode-batch-limit", "1", "--prefilling-limit", "1", "--waiting-limit", "1")
    with fleet_of(tmp_path, worker_options=options, gateway_options=("--policy", "round_robin")) as fleet:
        full, free = fleet.workers
        with grpc.insecure_channel(f"127.0.0.1:{full}") as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            sampling = sampling_pb2.SamplingParams(ignore_end_tokens=True)
            wanted = native.GenerateRequest(
                prompt={"text": "Long"}, max_output_tokens=LONG, sampling=sampling
            )
            # One runs and one waits, which is all there is room for.
            held = [stub.Stream(wanted) for _ in range(2)]
            until(lambda: counts(fleet, full) == (1, 1))
            answers = [fleet.chat(f"Short {number}", max_tokens=1) for number in range(4)]
            assert all(answer.choices for answer in answers)
            assert fleet.stats(full).rejected_total >= 1
            assert fleet.stats(free).accepted_total == 4
            for stream in held:
                stream.cancel()


def test_a_killed_worker_costs_its_own_streams_alone(tmp_path: Path) -> None:
    with fleet_of(tmp_path, gateway_options=("--policy", "round_robin")) as fleet:
        streams = [fleet.streamed(f"Story {number}") for number in range(2)]
        assert [fleet.stats(port).decoding_count for port in fleet.workers] == [1, 1]
        victim = next(iter(fleet.workers))
        fleet.workers.pop(victim).kill()
        ends = [_end_of(stream) for stream in streams]
        assert sorted(ends) == ["broken", "length"]
        # Whoever asks now is served by the one that is left, from the first try on.
        assert all(fleet.chat(f"Afterwards {number}").choices for number in range(4))


def _end_of(stream: Any) -> str:
    import openai

    try:
        reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    except openai.APIError:
        return "broken"
    return next((reason for reason in reasons if reason), "broken")
