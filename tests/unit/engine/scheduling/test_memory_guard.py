"""Estimates and refusals; then the loop under pressure, with a runner whose memory is counted."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.domain.events import Failed, Finished
from icehouse_server.engine.core.memory_model import MemoryModel, ModelShape
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.errors import CannotFit, Overloaded, Reason

from tests.fixtures.engine import memory_model
from tests.unit.engine.test_loop import SteppedLoop


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128},
        {
            "text_config": {
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "ffn_dim": 128,
            }
        },
        {"language_config": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 128}},
        {"llm_config": {"d_model": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128}},
    ],
)
def test_facts_are_found_in_nested_and_old_configs(config) -> None:
    shape = ModelShape.of(config, compute_bytes=2, keeps_scores=True)
    assert (shape.hidden_size, shape.layer_count, shape.head_count, shape.feed_forward_size) == (
        64,
        3,
        4,
        128,
    )


def test_a_longer_context_or_chunk_needs_more() -> None:
    shape = ModelShape(64, 2, 4, 128, 1000, 4, keeps_scores=True)
    model = MemoryModel(shape, kv_bytes_per_token=100, fixed_bytes_per_sequence=7)
    assert model.kv_bytes(10) == 1007
    short = model.chunk_bytes(chunk_token_count=16, context_token_count=100)
    assert model.chunk_bytes(chunk_token_count=16, context_token_count=1000) > short
    assert model.chunk_bytes(chunk_token_count=32, context_token_count=100) == 2 * short


def test_without_a_limit_everything_fits() -> None:
    guard = MemoryGuard(memory_model(), limit_bytes=0, weight_bytes=100, chunk_token_count=4)
    assert guard.never_fits(10**9) is None
    assert guard.excess_bytes(active_bytes=10**12, needed_bytes=10**12) == 0


def test_what_can_never_fit_is_refused_before_it_waits_with_estimate_and_limit() -> None:
    served = SteppedLoop(memory_limit_bytes=300, context_token_limit=1000)
    served.submit("huge", [1] * 30, max_output_tokens=2)
    served.submit("fine", [1] * 10, max_output_tokens=2)
    served.run()
    end = served.recorder.end_of("huge")
    assert isinstance(end, Failed) and isinstance(end.error, CannotFit)
    assert end.error.reason is Reason.MEMORY_NEVER_FITS
    assert end.error.metadata["limit_bytes"] == "300"
    assert int(end.error.metadata["estimated_bytes"]) > 300
    assert len(served.recorder.events["huge"]) == 1, "no event before the refusal"
    assert isinstance(served.recorder.end_of("fine"), Finished)


def counted(served: SteppedLoop) -> None:
    """The runner's memory: the weights and ten bytes for each token of each live sequence."""
    served.runner.active_bytes = lambda: 100 + 10 * sum(len(h) for h in served.runner.history.values())


def test_what_does_not_fit_now_waits_until_it_does() -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000)
    counted(served)
    served.submit("first", [1] * 15, max_output_tokens=5)
    served.submit("second", [1] * 15, max_output_tokens=5)
    served.loop.step()
    assert served.scheduler.waiting_count == 1, "the second waits for memory, not for a slot"
    served.run()
    assert all(isinstance(served.recorder.end_of(n), Finished) for n in ("first", "second"))


def test_the_ram_tier_gives_way_before_anybody_waits_or_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000)
    yielded: list[int] = []

    def give(size_bytes: int) -> int:
        yielded.append(size_bytes)
        return size_bytes

    served.runner.active_bytes = lambda: 390  # what was let go is still the allocator's
    monkeypatch.setattr(served.prefix.cache, "yield_ram", give)
    served.submit("a", [1] * 10, max_output_tokens=5)
    served.run()
    assert isinstance(served.recorder.end_of("a"), Finished)
    assert yielded and served.loop.counters.stats.parked_total == 0


def test_memory_taken_by_others_refuses_with_numbers_instead_of_waiting_for_ever() -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000)
    served.runner.active_bytes = lambda: 390
    served.submit("a", [1] * 10, max_output_tokens=5)
    served.run()
    end = served.recorder.end_of("a")
    assert isinstance(end, Failed) and isinstance(end.error, Overloaded)
    assert end.error.reason is Reason.MEMORY_SHORT and end.error.retry_after_s
    assert end.error.metadata["active_bytes"] == "390"


def test_the_youngest_is_parked_and_goes_on_with_the_same_tokens() -> None:
    alone = SteppedLoop(context_token_limit=1000)
    for name, start in (("old", 1), ("young", 5)):
        alone.submit(name, range(start, start + 6), max_output_tokens=30)
    alone.run()

    tight = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000)
    counted(tight)
    for name, start in (("old", 1), ("young", 5)):
        tight.submit(name, range(start, start + 6), max_output_tokens=30)
    for _ in range(12):
        tight.loop.step()
    old, young = tight.scheduler.running
    assert tight.scheduler.decoding_count == 2
    tight.pressure_limit(500)  # enough for either alone, not for both to the end
    tight.run()
    for name in ("old", "young"):
        assert tight.recorder.tokens_of(name) == alone.recorder.tokens_of(name)
        starts = [e for e in tight.recorder.events[name] if type(e).__name__ == "Started"]
        assert len(starts) == 1
    assert young.park_count >= 1 and old.park_count == 0


def test_one_that_decodes_alone_is_let_go_on() -> None:
    served = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000)
    counted(served)
    served.submit("alone", [1] * 6, max_output_tokens=9)
    while not served.scheduler.decoding_count:
        served.loop.step()
    served.pressure_limit(50)  # less than the weights: parking it would free nothing for anybody
    served.run()
    assert isinstance(served.recorder.end_of("alone"), Finished)
    assert served.loop.stats().parked_total == 0


def in_one_lane(served: SteppedLoop) -> None:
    """Let sequences decode as rows of one array, as the runner's do."""
    served.guard._model = dataclasses.replace(served.guard._model, lane_row_limit=8)


def test_rows_are_padded_to_the_longest_and_copied_when_one_joins() -> None:
    alone = memory_model()
    shared = dataclasses.replace(alone, lane_row_limit=3)
    assert (alone.padding_bytes([5, 9]), alone.seating_bytes([5, 9])) == (0, 0)
    assert (shared.padding_bytes([5, 9]), shared.seating_bytes([5, 9])) == (40, 180)
    assert shared.seating_bytes([9]) == 0, "a row that decodes alone is not copied"
    assert shared.seating_bytes([9] * 8) == 270, "no more than a lane"


def test_padding_beside_a_long_row_is_waited_for() -> None:
    # Alone both would fit: 45 and 10 tokens of ten bytes beside 100 of weights. As rows of 45 they do not.
    for shares, waiting_count in ((False, 0), (True, 1)):
        served = SteppedLoop(memory_limit_bytes=900, context_token_limit=1000)
        counted(served)
        if shares:
            in_one_lane(served)
        served.submit("long", [1] * 40, max_output_tokens=5)
        served.submit("short", [1] * 8, max_output_tokens=2)
        served.loop.step()
        assert served.scheduler.waiting_count == waiting_count
        served.run()
        assert all(isinstance(served.recorder.end_of(n), Finished) for n in ("long", "short"))


def test_padding_that_is_held_already_is_not_asked_for_again() -> None:
    served = SteppedLoop(context_token_limit=1000)
    in_one_lane(served)
    for name, token_count in (("long", 40), ("short", 8)):
        served.submit(name, [1] * token_count, max_output_tokens=5)
    while served.scheduler.decoding_count < 2:
        served.loop.step()
    decoding = served.scheduler.decoding
    newcomer = dataclasses.replace(decoding[1])
    rows = [*decoding, newcomer]
    whole = served.guard.lane_growth_bytes(rows, decoding=())
    held = served.guard._model.padding_bytes([s.kv_token_count for s in decoding])
    assert held > 0 and served.guard.lane_growth_bytes(rows, decoding=decoding) == whole - held


def test_a_join_that_finds_no_room_parks_the_youngest_beside_it() -> None:
    served = SteppedLoop(memory_limit_bytes=10_000, context_token_limit=1000)
    counted(served)
    in_one_lane(served)
    for name, start in (("first", 1), ("second", 5)):
        served.submit(name, range(start, start + 6), max_output_tokens=9)
    while not served.scheduler.decoding_count:
        served.loop.step()
    served.pressure_limit(300)  # both are held, and their lane cannot be copied
    while not served.loop.counters.stats.parked_total:
        assert served.scheduler.decoding_count < 2, "no lane of two was ever made"
        served.loop.step()
    served.pressure_limit(10_000)
    served.run()
    assert all(isinstance(served.recorder.end_of(n), Finished) for n in ("first", "second"))


def test_an_overrun_ends_one_request_and_not_the_engine() -> None:
    served = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000)
    counted(served)
    served.submit("grows", [1] * 40, max_output_tokens=2)
    served.loop.step()
    served.pressure_limit(200)
    served.run()
    end = served.recorder.end_of("grows")
    assert isinstance(end, Failed) and end.error.reason is Reason.MEMORY_SHORT
    served.pressure_limit(1000)
    served.submit("next", [1] * 4, max_output_tokens=2)
    served.run()
    assert isinstance(served.recorder.end_of("next"), Finished)


def test_a_follower_goes_on_although_nobody_else_may_start() -> None:
    """Found by the simulation: the queue's head waited for memory that only the follower could free."""
    served = SteppedLoop(memory_limit_bytes=700, context_token_limit=1000)
    counted(served)
    served.submit("leader", [1] * 15, max_output_tokens=5)
    served.loop.step()
    follower = next(iter(served.scheduler.running))
    served.scheduler.start_following(follower)
    served.submit("big", [2] * 50, max_output_tokens=5)
    served.loop.step()
    assert served.scheduler.waiting_count == 1
    served.prefix._in_flight._ready.append(follower)
    served.run()
    assert isinstance(served.recorder.end_of("leader"), Finished)
    assert isinstance(served.recorder.end_of("big"), Finished)


@pytest.mark.parametrize(
    ("vocabulary_size", "block_token_count", "expected"),
    [
        (262_144, 256, 32),
        (320, 256, 41_728),
        (262_144, 48, 48),
        (1 << 20, 256, 8),
        (1 << 20, 7, 7),
        (1 << 24, 7, 1),
    ],
)
def test_measured_chunks_end_where_blocks_do(
    vocabulary_size: int, block_token_count: int, expected: int
) -> None:
    shape = dataclasses.replace(memory_model().shape, vocabulary_size=vocabulary_size)
    model = dataclasses.replace(memory_model(), shape=shape)
    count = model.measured_token_count(budget_bytes=256 << 20, block_token_count=block_token_count)
    assert count == expected
    assert block_token_count % count == 0 or count % block_token_count == 0


def test_the_logits_of_a_measured_chunk_count() -> None:
    shape = dataclasses.replace(memory_model().shape, vocabulary_size=1000)
    guard = MemoryGuard(
        dataclasses.replace(memory_model(), shape=shape), limit_bytes=1, weight_bytes=0, chunk_token_count=4
    )
    assert guard.chunk_bytes(3, 8, is_measured=True) - guard.chunk_bytes(3, 8) >= 3 * 1000 * 4 * 2
