"""Images between the steps of others: layer by layer, in their memory, before their tokens and no earlier."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.events import Failed, Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import GenerationRequest, ImageInput, ImageSpan, image_digest
from icehouse_server.engine.core.mailbox import Cancel, Submit
from icehouse_server.engine.core.refusals import cancelled_by_client
from icehouse_server.engine.core.sequence import Phase
from icehouse_server.errors import InvalidRequest, Overloaded, Reason

from tests.fixtures.engine import LAYER_COUNT, request
from tests.unit.engine.test_loop import SteppedLoop

PROMPT = (1, 2, 3, 9, 9, 9, 4, 9, 9, 9)


def seeing(request_id: str) -> GenerationRequest:
    """Return a request with text, an image, text and another image at the end."""
    tensors = (HostTensor("pixels", "U8", (2, 2), memoryview(bytes(4))),)
    image = ImageInput(image_digest(b"", tensors), tensors, feature_count=3)
    spans = (ImageSpan(3, 6, image), ImageSpan(7, 10, image))
    return dataclasses.replace(request(request_id, PROMPT), images=spans)


def submit(served: SteppedLoop, request_id: str) -> None:
    assert served.mailbox.offer(Submit(seeing(request_id)))


def test_each_image_is_there_before_its_tokens_run_and_others_draw_meanwhile() -> None:
    served = SteppedLoop()
    served.runner.layer_s = 0.3

    def decode() -> None:
        served.clock.now += 1.0

    served.runner.on_decode = decode
    served.submit("row", (1, 2), max_output_tokens=40)
    for _ in range(5):
        served.loop.step()
    submit(served, "seeing")
    fed: list[tuple[int, int]] = []
    while served.recorder.end_of("seeing") is None:
        drawn_count, layer_count = len(served.recorder.tokens_of("row")), sum(served.runner.layers.values())
        served.loop.step()
        assert sum(served.runner.layers.values()) <= layer_count + 1, "a slice a step"
        assert len(served.recorder.tokens_of("row")) >= drawn_count
        running = [s for s in served.scheduler.running if s.request.images]
        fed += [(s.processed_token_count, served.runner.layers.get(s.sequence_id, 0)) for s in running]
    assert all(layers >= LAYER_COUNT for count, layers in fed if count > 3)
    assert all(layers >= 2 * LAYER_COUNT for count, layers in fed if count > 7)
    assert {3, 7} <= {count for count, _ in fed}, "text before an image does not wait for it"
    during = len(served.recorder.tokens_of("row"))
    assert during >= 2 * LAYER_COUNT, "a row drew in every step that encoded"


def test_a_cancelled_image_leaves_nothing_behind() -> None:
    served = SteppedLoop()
    served.submit("row", (1, 2), max_output_tokens=20)
    submit(served, "gone")
    while not served.runner.layers:
        served.loop.step()
    served.mailbox.post(Cancel(RequestId("gone"), cancelled_by_client()))
    submit(served, "next")
    served.run()
    assert isinstance(served.recorder.end_of("next"), Finished)
    assert served.runner.history == {}


def test_an_image_on_which_the_tower_fails_ends_its_request_alone() -> None:
    served = SteppedLoop()
    served.runner.image_error = InvalidRequest(Reason.IMAGE_INVALID, "the tower failed")
    served.submit("row", (1, 2), max_output_tokens=20)
    submit(served, "seeing")
    served.run()
    end = served.recorder.end_of("seeing")
    assert isinstance(end, Failed) and end.error is served.runner.image_error
    assert isinstance(served.recorder.end_of("row"), Finished)
    assert served.runner.history == {}


def test_memory_for_an_image_is_taken_from_who_came_last_and_given_back() -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000)
    served.runner.active_bytes = lambda: 100 + 10 * sum(len(h) for h in served.runner.history.values())
    served.runner.image_bytes = 200
    submit(served, "seeing")
    served.submit("row", (1, 2), max_output_tokens=5)
    served.run()
    ends = [served.recorder.end_of(name) for name in ("seeing", "row")]
    assert all(isinstance(end, Finished) for end in ends), ends
    assert served.loop.counters.stats.parked_total == 1


def test_a_step_goes_on_with_the_image_that_has_room_though_an_older_prompt_comes_back() -> None:
    """The older one's was gone on with, for which there was no room, and the other one's given up."""
    served = SteppedLoop()
    for name in ("old", "young"):
        submit(served, name)
        served.loop.step()
    old, young = served.scheduler.running
    served.scheduler.move(old, Phase.RESTORING)
    before = dict(served.runner.layers)
    served.loop.step()
    assert served.scheduler.awaiting_image is old, "it is back, and the first comer"
    assert served.runner.layers == {**before, young.sequence_id: before.get(young.sequence_id, 0) + 1}


def test_an_image_that_has_no_memory_even_alone_is_refused_with_numbers() -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000)
    served.runner.active_bytes = lambda: 100 + 10 * sum(len(h) for h in served.runner.history.values())
    served.runner.image_bytes = 300
    submit(served, "seeing")
    served.submit("text", (1, 2))
    served.run()
    end = served.recorder.end_of("seeing")
    assert isinstance(end, Failed) and isinstance(end.error, Overloaded)
    assert (end.error.reason, end.error.metadata["needed_bytes"]) == (Reason.MEMORY_SHORT, "300")
    assert isinstance(served.recorder.end_of("text"), Finished)
