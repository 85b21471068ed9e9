"""Embeddings in the step: every token runs, in slices between the decode steps of others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from icehouse_server.domain.events import Finished
from icehouse_server.domain.request import Pooling, Vector
from icehouse_server.engine.core.mailbox import Submit

from tests.fixtures.engine import request
from tests.unit.engine.test_loop import SteppedLoop


def submit(served: SteppedLoop, name: str, tokens: range, pooling: Pooling) -> None:
    asked = dataclasses.replace(request(name, tokens, max_output_tokens=0), pooling=pooling)
    assert served.mailbox.offer(Submit(asked))


def vector_of(served: SteppedLoop, name: str) -> Vector:
    end = served.recorder.end_of(name)
    assert isinstance(end, Finished) and end.embedding is not None, end
    return end.embedding


@pytest.mark.parametrize("count", [1, 2, 4, 5, 11])
def test_every_token_counts_once_and_the_last_one_too(count: int) -> None:
    served = SteppedLoop()
    tokens = range(1, count + 1)
    submit(served, "mean", tokens, Pooling.MEAN)
    submit(served, "last", tokens, Pooling.LAST_TOKEN)
    served.run()
    np.testing.assert_allclose(vector_of(served, "mean"), [sum(tokens) / count])
    np.testing.assert_allclose(vector_of(served, "last"), [count])
    assert sum(length for _, length in served.runner.chunks) == 2 * count
    assert served.runner.history == {}, "nothing is left behind"


def test_a_text_has_no_vector() -> None:
    served = SteppedLoop()
    served.submit("a", max_output_tokens=2)
    served.run()
    end = served.recorder.end_of("a")
    assert isinstance(end, Finished) and end.embedding is None


def test_others_decode_between_the_slices_of_a_long_input() -> None:
    served = SteppedLoop()
    order: list[str] = []

    def took(what: str, seconds: float) -> None:
        order.append(what)
        served.clock.now += seconds

    served.runner.on_prefill = lambda: took("slice", 0.01)
    served.runner.on_decode = lambda: took("step", 0.01)
    served.submit("text", (1, 2), max_output_tokens=30)
    for _ in range(4):
        served.loop.step()
    order.clear()
    submit(served, "long", range(1, 33), Pooling.MEAN)
    served.run()
    np.testing.assert_allclose(vector_of(served, "long"), [16.5])
    last_slice = len(order) - order[::-1].index("slice")
    assert order[:last_slice].count("step") >= 5, order


def test_a_parked_input_begins_again_and_counts_nothing_twice() -> None:
    served = SteppedLoop()
    submit(served, "mean", range(1, 12), Pooling.MEAN)
    for _ in range(2):
        served.loop.step()
    [running] = served.scheduler.running
    assert running.pooled is not None and running.processed_token_count < 11
    served.loop._park(running)
    assert running.pooled is None
    served.run()
    np.testing.assert_allclose(vector_of(served, "mean"), [6.0])
