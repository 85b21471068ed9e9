"""Estimates and refusals; then the loop under pressure, with a runner whose memory is counted."""

from __future__ import annotations

import dataclasses
import math

import pytest
from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.events import Failed, Finished
from icehouse_server.domain.ids import RequestId, SequenceId
from icehouse_server.domain.request import (
    Drafting,
    ImageInput,
    ImageSpan,
    LogprobsWanted,
    Speculation,
    image_digest,
)
from icehouse_server.engine.core.mailbox import Cancel
from icehouse_server.engine.core.memory_budget import BudgetShare, MemoryBudget
from icehouse_server.engine.core.memory_model import (
    DraftFootprint,
    MemoryModel,
    ModelShape,
    TowerShape,
    head_size_of,
    keeps_scores,
)
from icehouse_server.engine.core.refusals import cancelled_by_client
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.errors import CannotFit, Overloaded, Reason
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, memory_model, request
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


def share_of(limit_bytes: int) -> BudgetShare:
    return MemoryBudget(limit_bytes).enter()


def picture(shape: tuple[int, ...]) -> ImageInput:
    pixels = HostTensor("pixel_values", "F32", shape, memoryview(bytes(4 * math.prod(shape))))
    return ImageInput(image_digest(b"", (pixels,)), (pixels,), feature_count=4)


def test_an_image_takes_more_with_its_patches_and_scores_with_their_square() -> None:
    tower = TowerShape(
        hidden_size=8,
        feed_forward_size=16,
        head_count=2,
        patch_size=4,
        vector_size=32,
        compute_bytes=4,
        keeps_scores=False,
    )
    tile, tiles, run = picture((1, 1, 3, 16, 16)), picture((1, 5, 3, 16, 16)), picture((16, 48))
    rest = 4 * 4 * 32
    one = tower.encode_bytes(tile) - rest - tile.size_bytes
    assert tower.encode_bytes(tiles) - rest - tiles.size_bytes == 5 * one
    assert tower.encode_bytes(run) == tower.encode_bytes(tile), "patches are patches"
    scored = dataclasses.replace(tower, keeps_scores=True)
    scores = scored.encode_bytes(tile) - tower.encode_bytes(tile)
    assert scores == 2 * 2 * 16**2 * 4
    assert scored.encode_bytes(tiles) - tower.encode_bytes(tiles) == 5 * scores, "tiles see but themselves"


def test_an_image_that_never_fits_is_refused_before_it_waits_and_counts_before_it_starts() -> None:
    image = picture((16, 48))
    tower = TowerShape(8, 16, 2, 4, 32, 4, keeps_scores=False)
    needed = tower.encode_bytes(image)
    model = dataclasses.replace(memory_model(), tower=tower)
    asked = dataclasses.replace(request("r", [1] * 8), images=(ImageSpan(2, 6, image),))
    for limit_bytes, fits in ((needed + 20 + 100, True), (needed + 20 + 99, False)):
        guard = MemoryGuard(model, share=share_of(limit_bytes), weight_bytes=100, chunk_token_count=4)
        assert guard.never_fits(8) is None
        assert (guard.never_fits(8, asked) is None) is fits
    sequence = Sequence(
        SequenceId(1),
        asked,
        TextStream(decode=decode_ascii, prompt_token_ids=(), stops=()),
        output_token_limit=1,
    )
    before = guard.start_bytes(sequence)
    sequence.processed_token_count = 6
    sequence.phase = Phase.PREFILLING
    assert before >= needed > guard.start_bytes(sequence), "behind the image nothing is encoded"


def test_rows_are_charged_for_whole_steps_of_room() -> None:
    charged = {}
    for step in (1, 64, 256):
        model = dataclasses.replace(memory_model(), room_step_token_count=step)
        charged[step] = [model.kv_bytes(count) // 10 for count in (0, 100, 256, 257)]
    assert charged == {1: [0, 100, 256, 257], 64: [0, 128, 256, 320], 256: [0, 256, 256, 512]}


def test_arrays_that_grow_are_charged_for_their_copy_and_pages_for_themselves() -> None:
    shape = dataclasses.replace(memory_model().shape, layer_count=4)
    paged = dataclasses.replace(memory_model(), shape=shape, room_step_token_count=64)
    copied = dataclasses.replace(paged, copies_to_grow=True)
    for stop, pages, copies in ((256, 0, 128), (257, 64, 160)):
        asked = {"chunk_token_count": 1, "context_token_count": stop}
        assert paged.growth_bytes(**asked) == 10 * pages
        assert copied.growth_bytes(**asked) == 10 * (64 + copies), "wherever its arrays end"


def test_without_a_limit_everything_fits() -> None:
    guard = MemoryGuard(memory_model(), share=share_of(0), weight_bytes=100, chunk_token_count=4)
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


def test_what_who_left_held_is_free_before_those_who_wait_are_judged() -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000, waiting_limit=1)
    counted(served)
    served.submit("leaves", [1] * 15, max_output_tokens=5)
    served.loop.step()
    served.submit("waits", [1] * 15, max_output_tokens=5)
    served.loop.step()
    assert served.scheduler.waiting_count == 1
    served.mailbox.post(Cancel(RequestId("leaves"), cancelled_by_client()))
    served.submit("comes", [1] * 5, max_output_tokens=5)
    served.run()
    ends = [served.recorder.end_of(name) for name in ("waits", "comes")]
    assert all(isinstance(end, Finished) for end in ends), ends


def test_the_ram_tier_gives_way_before_anybody_waits_or_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000)
    yielded: list[int] = []

    def give(size_bytes: int, **how) -> int:
        yielded.append(size_bytes)
        return size_bytes

    served.runner.active_bytes = lambda: 390  # what was let go is still the allocator's
    monkeypatch.setattr(served.prefix, "yield_ram", give)
    monkeypatch.setattr(served.prefix, "yieldable_bytes", lambda protected: 10_000)
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


def test_one_that_decodes_alone_gives_way_to_another_model_and_goes_on_when_that_has_ended() -> None:
    alone = SteppedLoop(context_token_limit=1000)
    alone.submit("grows", [1] * 6, max_output_tokens=40)
    alone.run()

    served = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000)
    other, is_at_work = served.budget.enter(), True
    other.is_idle = lambda: not is_at_work
    served.runner.active_bytes = lambda: (
        100 + other.fixed_bytes + 10 * sum(len(h) for h in served.runner.history.values())
    )
    served.submit("grows", [1] * 6, max_output_tokens=40)
    while not served.scheduler.decoding_count:
        served.loop.step()
    other.fixed_bytes = 600  # loaded since it was let in
    for _ in range(60):
        served.loop.step()
        assert served.runner.active_bytes() <= 1000
    assert served.loop.stats().parked_total == 1 and served.recorder.end_of("grows") is None
    other.fixed_bytes, is_at_work = 0, False
    served.run()
    assert isinstance(served.recorder.end_of("grows"), Finished)
    assert served.recorder.tokens_of("grows") == alone.recorder.tokens_of("grows")


def test_behind_an_idle_model_nobody_waits_for_memory() -> None:
    served = SteppedLoop(memory_limit_bytes=400, context_token_limit=1000)
    other = served.budget.enter()
    other.varying_bytes, other.is_idle = (lambda: 290), (lambda: False)
    served.runner.active_bytes = lambda: 390
    served.submit("a", [1] * 8, max_output_tokens=1)
    for _ in range(3):
        served.loop.step()
    assert served.recorder.end_of("a") is None
    other.is_idle = lambda: True
    served.run()
    end = served.recorder.end_of("a")
    assert isinstance(end, Failed) and end.error.reason is Reason.MEMORY_SHORT


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
    served.scheduler.move(follower, Phase.FOLLOWING)
    follower.processed_token_count = 0
    served.runner.release([follower.sequence_id])
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
        dataclasses.replace(memory_model(), shape=shape),
        share=share_of(1),
        weight_bytes=0,
        chunk_token_count=4,
    )
    assert guard.chunk_bytes(3, 8, is_measured=True) - guard.chunk_bytes(3, 8) >= 3 * 1000 * 4 * 2


def a_sequence(number: int, token_count: int, *, output_token_limit: int = 100) -> Sequence:
    text = TextStream(decode=decode_ascii, prompt_token_ids=[], stops=())
    asked = request(f"r{number}", [1] * token_count, max_output_tokens=output_token_limit)
    return Sequence(SequenceId(number), asked, text, output_token_limit=output_token_limit)


def llama_8b(**changes) -> MemoryGuard:
    """Llama 8B in bfloat16 with pages of 64 tokens and chunks of 1,024."""
    shape = ModelShape(4096, 32, 32, 14336, 128256, 2, keeps_scores=False)
    model = MemoryModel(
        shape, kv_bytes_per_token=131072, fixed_bytes_per_sequence=0, room_step_token_count=64
    )
    return MemoryGuard(
        dataclasses.replace(model, **changes),
        share=share_of(1),
        weight_bytes=0,
        chunk_token_count=1024,
    )


def test_rows_that_decode_are_charged_for_nothing_but_the_kv_they_were_let_in_for() -> None:
    guard = llama_8b()
    rows = [a_sequence(number, 500, output_token_limit=200) for number in range(127)]
    for row in rows:
        row.phase, row.processed_token_count, row.fed_ahead_count = Phase.DECODING, 499, 1
    assert guard.growth_bytes(rows) == 127 * (704 - 512) * 131072, "to the 700 tokens that they may have"
    for row in rows:
        row.output_token_ids += [1] * 190
    assert guard.growth_bytes(rows) == 0, "what they hold reaches to their end"
    assert guard.pass_bytes([], decoding=rows) == 0
    rows[0].output_token_ids = [1] * 12
    assert guard.pass_bytes([], decoding=rows) == 64 * 131072, "one begins another page"
    rows[0].output_token_ids = [1] * 190
    newcomer = a_sequence(200, 500)
    assert guard.start_bytes(newcomer, beside=rows) == guard.start_bytes(newcomer)


def test_one_long_row_makes_nobody_else_longer() -> None:
    """It used to stand in a lane whose rows were all padded to it: 5 short ones fitted beside 32k tokens."""
    guard = llama_8b()
    rows = [a_sequence(number, 500) for number in range(127)]
    rows.append(a_sequence(127, 32_768))
    for row in rows:
        row.phase, row.processed_token_count, row.fed_ahead_count = Phase.DECODING, row.prefill_target, 1
        row.output_token_ids = [1] * 99
    newcomer = a_sequence(200, 500)
    assert guard.start_bytes(newcomer, beside=rows) == guard.start_bytes(newcomer)
    assert guard.pass_bytes([], decoding=rows) == 0


def test_kv_whose_arrays_are_there_for_the_readers_is_not_charged_again() -> None:
    guard = llama_8b()
    loading = a_sequence(1, 1000)
    loading.phase = Phase.LOADING
    whole = guard.growth_bytes([loading])
    assert whole == 1152 * 131072
    loading.loading_token_count = 1064
    assert guard.growth_bytes([loading]) == 88 * 131072
    newcomer = a_sequence(2, 1000)
    needed = guard.start_bytes(newcomer, beside=[loading])
    assert needed == guard.start_bytes(newcomer) + 88 * 131072


def test_one_transient_is_kept_for_all_inputs_that_are_still_to_run() -> None:
    guard = llama_8b()
    inputs = [a_sequence(number, count) for number, count in enumerate([500, 5000, 600])]
    kv_bytes = guard.growth_bytes(inputs)
    largest = guard.start_bytes(inputs[1]) - guard.growth_bytes(inputs[1:2])
    assert largest > 0 and guard.start_bytes(inputs[0], beside=inputs[1:]) == kv_bytes + largest


def test_what_could_never_fit_with_its_logits_or_its_draft_is_told_so() -> None:
    model = dataclasses.replace(memory_model(), draft=DraftFootprint(kv_bytes_per_token=90))
    model = dataclasses.replace(model, shape=dataclasses.replace(model.shape, vocabulary_size=10))
    guard = MemoryGuard(
        model,
        share=share_of(600),
        weight_bytes=0,
        chunk_token_count=4,
        measured_chunk_token_count=4,
    )
    plain = request("plain", [1] * 20)
    drafted = dataclasses.replace(plain, speculation=Speculation(3, drafting=Drafting.DRAFT_MODEL))
    measured = dataclasses.replace(plain, logprobs=LogprobsWanted(of_prompt=True))
    assert guard.never_fits(20, plain) is None
    assert guard.never_fits(20, drafted) is not None and guard.never_fits(20, measured) is not None


def blocked(served: SteppedLoop) -> list[int]:
    """Let one long decode hold memory and watch what is asked of the RAM tier, which has 100 bytes."""
    dropped: list[int] = []
    counted(served)
    served.submit("runs", [1] * 6, max_output_tokens=50)
    while not served.scheduler.decoding_count:
        served.loop.step()

    def give(size_bytes: int, **how) -> int:
        dropped.append(size_bytes)
        return 0

    def yieldable_bytes(**how) -> int:
        return 100

    served.prefix.yield_ram = give  # type: ignore[method-assign]
    served.prefix.yieldable_bytes = yieldable_bytes  # type: ignore[method-assign]
    return dropped


def test_nothing_is_dropped_for_a_request_that_cannot_start_anyway_and_smaller_ones_pass_it() -> None:
    served = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000)
    dropped = blocked(served)
    served.submit("big", [2] * 60, max_output_tokens=5)
    served.submit("small", [3], max_output_tokens=1)
    served.loop.step()
    served.loop.step()
    assert dropped == []
    assert isinstance(served.recorder.end_of("small"), Finished) and served.scheduler.waiting_count == 1


def test_only_so_many_pass_a_request_that_does_not_fit_yet() -> None:
    served = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000, waiting_limit=50)
    blocked(served)
    served.submit("big", [2] * 60, max_output_tokens=5)
    for number in range(30):
        served.submit(f"small{number}", [3], max_output_tokens=1)
        served.loop.step()
    served.loop.step()
    ended = [n for n in range(30) if served.recorder.end_of(f"small{n}") is not None]
    assert ended == list(range(16))
    served.run()
    assert isinstance(served.recorder.end_of("big"), Finished)


def test_the_one_of_least_priority_gives_way_though_it_came_first() -> None:
    served = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000)
    counted(served)
    for name, priority in (("cheap", 0), ("dear", 1)):
        served.submit(name, [1] * 6, max_output_tokens=30, priority=priority)
    while served.scheduler.decoding_count < 2:
        served.loop.step()
    cheap = next(s for s in served.scheduler.running if s.request.request_id == "cheap")
    served.pressure_limit(450)
    while not cheap.park_count:
        served.loop.step()
    served.pressure_limit(10_000)
    served.run()
    assert cheap.park_count == 1 and served.loop.counters.stats.parked_total == 1


def test_an_older_one_is_not_parked_for_the_chunk_of_a_younger_one() -> None:
    served = SteppedLoop(memory_limit_bytes=10_000, context_token_limit=1000)
    counted(served)
    served.submit("old", [1] * 6, max_output_tokens=30)
    while not served.scheduler.decoding_count:
        served.loop.step()
    served.submit("young", [2] * 40, max_output_tokens=5)
    served.loop.step()
    old, young = served.scheduler.running
    assert young.phase is Phase.PREFILLING and young.processed_token_count
    served.pressure_limit(served.runner.active_bytes() + 15)  # enough for the row, not for four tokens more
    served.loop.step()
    assert (old.park_count, young.park_count) == (0, 1)
    served.pressure_limit(10_000)
    served.run()
    assert old.park_count == 0


def test_a_step_that_parked_somebody_is_followed_at_once() -> None:
    """The chunk of the younger did not fit, it was parked, and the older waited half a second for nothing."""
    served = SteppedLoop(memory_limit_bytes=10_000, context_token_limit=1000)
    counted(served)
    served.submit("old", [1] * 30, max_output_tokens=3)
    served.submit("young", [2] * 20, max_output_tokens=3)
    served.loop.step()
    served.loop.step()
    old, young = served.scheduler.running
    assert old.phase is young.phase is Phase.PREFILLING
    served.pressure_limit(served.runner.active_bytes())
    served.loop.step()
    assert (old.park_count, young.park_count) == (0, 1)
    before = old.processed_token_count
    assert served.loop.wait_s is None
    served.loop.step()
    assert old.processed_token_count > before
    served.pressure_limit(10_000)
    served.run()
    ends = [served.recorder.end_of(name) for name in ("old", "young")]
    assert all(isinstance(end, Finished) for end in ends), ends


def test_memory_that_loading_ones_hold_is_waited_for() -> None:
    served = SteppedLoop(memory_limit_bytes=1000, context_token_limit=1000)
    counted(served)
    served.submit("grows", [1] * 40, max_output_tokens=2)
    served.submit("loads", [2] * 10, max_output_tokens=2)
    served.loop.step()
    loads = served.scheduler.running[1]
    served.scheduler.move(loads, Phase.LOADING)
    served.pressure_limit(200)
    for _ in range(3):
        served.loop.step()
    assert served.recorder.end_of("grows") is None and served.loop.is_idle
    served.pressure_limit(1000)
    served.runner.release([loads.sequence_id])
    loads.processed_token_count = 0
    served.loop._begin(loads)
    served.run()
    assert isinstance(served.recorder.end_of("grows"), Finished)


@pytest.mark.parametrize(
    ("device", "head_size", "compute_bytes", "expected"),
    [
        ("cpu", 128, 2, True),
        ("metal", 72, 2, False),
        ("metal", 96, 2, False),
        ("metal", 128, 2, False),
        ("metal", 256, 2, True),
        ("cuda", 128, 2, False),
        ("cuda", 128, 4, True),
        ("cuda", 256, 2, True),
    ],
)
def test_attention_writes_its_scores_out_where_no_fused_kernel_fits(
    device: str, head_size: int, compute_bytes: int, expected: bool
) -> None:
    assert (
        head_size_of({"text_config": {"hidden_size": 4 * head_size, "num_attention_heads": 4}}) == head_size
    )
    assert head_size_of({"head_dim": head_size, "hidden_size": 7}) == head_size
    assert keeps_scores(device=device, head_size=head_size, compute_bytes=compute_bytes) is expected
