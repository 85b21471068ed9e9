"""Planning on devices that are arithmetic: how many passes prompts take, how evenly tokens come beside."""

from __future__ import annotations

import dataclasses
import random

import pytest
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.policy import GPU_POLICY, POLICY

from tests.unit.engine.scheduling.devices import CPU, GPU, H200, Costs, Quirks, Served

GPU_LIMITS = SchedulerLimits(
    running_limit=256,
    prefilling_limit=8,
    prefill_chunk_token_count=2048,
    prefill_grid_token_count=64,
    pass_token_count=8192,
    pads_attention=True,
    prefill_chunk_s=1.0,
    policy=GPU_POLICY,
)
CPU_LIMITS = dataclasses.replace(
    GPU_LIMITS,
    running_limit=64,
    prefill_chunk_token_count=512,
    prefill_grid_token_count=8,
    pass_token_count=512,
    pads_attention=False,
    policy=POLICY,
)
PASS_TOKEN_COUNT = 8192
QUIRKS = {
    "plain": Quirks(),
    "noisy": Quirks(noise=0.1),
    "slow start": Quirks(slow_count=3),
    "ahead": Quirks(runs_ahead=True, host_s=0.004, noise=0.05),
    "ahead, slow start": Quirks(runs_ahead=True, host_s=0.004, slow_count=3),
    "ahead, new shapes": Quirks(runs_ahead=True, host_s=0.004, shape_s=0.04),
    "ahead, seen late": Quirks(runs_ahead=True, host_s=0.004, late_s=0.004),
    "host-bound": Quirks(runs_ahead=True, host_s=0.012),
    "replayed": Quirks(runs_ahead=True, host_s=0.0148, replay_s=0.0069),
}
gpus = pytest.mark.parametrize("quirks", QUIRKS.values(), ids=QUIRKS)
CPU_QUIRKS = ("plain", "noisy", "slow start")
cpus = pytest.mark.parametrize("quirks", [QUIRKS[name] for name in CPU_QUIRKS], ids=CPU_QUIRKS)


def gpu(quirks: Quirks, *, costs: Costs = GPU) -> Served:
    """Return a GPU whose server has served a prompt of five tokens and some decode."""
    served = Served(costs, GPU_LIMITS, quirks)
    (first,) = served.ask(5)
    served.run_until_decoding(first)
    served.run(20)
    served.end(first)
    return served


def best_s(costs: Costs, *prompt_token_counts: int, pass_token_count: int) -> float:
    """Return the time of prompts in the longest passes there are."""
    total = sum(prompt_token_counts)
    scores = sum(count * count // 2 for count in prompt_token_counts)
    pass_count = -(-total // pass_token_count)
    return (pass_count - 1) * costs.fixed_s + costs.seconds(PassSize(total, scores))


@gpus
def test_eight_prompts_of_2_000_tokens_take_few_passes_from_the_first_burst_on(quirks: Quirks) -> None:
    served = gpu(quirks)
    first = served.serve(*[2000] * 8)
    assert len(first) <= (12 if quirks.shape_s else 8), "2 are possible, and sizes are to be learned first"
    steps = served.serve(*[2000] * 8)
    assert len(steps) <= 6
    if not quirks.shape_s:
        best = best_s(GPU, *[2000] * 8, pass_token_count=PASS_TOKEN_COUNT)
        assert served.seconds_of(first) <= 1.4 * best
        assert served.seconds_of(steps) <= 1.15 * best


@gpus
def test_64_prompts_of_40_tokens_take_a_pass_or_two(quirks: Quirks) -> None:
    served = gpu(quirks)
    assert len(served.serve(*[40] * 64)) <= 9
    assert len(served.serve(*[40] * 64)) <= 2


@gpus
@pytest.mark.parametrize(("costs", "most_times"), [(GPU, 2.2), (H200, 2.8)], ids=["light", "H200"])
def test_tokens_of_16_rows_come_evenly_beside_16_000_tokens(
    quirks: Quirks, costs: Costs, most_times: float
) -> None:
    """Which take two to three times as long as alone: padded, short chunks are dear behind many tokens.

    Where passes of rows alone are replayed, any chunk makes one twice as long. Its gaps are longer then than
    was promised, and with the shortest chunks there would be four times as many.
    """
    served = gpu(quirks, costs=costs)
    served.serve(16_000)
    alone_s = served.seconds_of(served.serve(16_000))
    rows = served.ask(*[40] * 16)
    served.run_until_decoding(*rows)
    usual_s = sorted(served.gaps(served.run(30)))[15]
    for _ in range(2):
        (prompt,) = served.ask(16_000)
        steps = served.run_until_decoding(prompt)
        gaps = sorted(
            gap - quirks.shape_s * step.shape_count
            for gap, step in zip(served.gaps(steps), steps, strict=True)
        )
        served.end(prompt)
        served.run(10)
    assert gaps[int(0.99 * len(gaps))] <= (2.8 if quirks.replay_s else 2.2) * usual_s
    assert sum(gaps) <= (1.25 if quirks.late_s or quirks.replay_s else 1.0) * most_times * alone_s


def test_two_long_prompts_beside_16_rows_are_no_crowd() -> None:
    served = gpu(QUIRKS["ahead"])
    served.serve(16_000)
    rows = served.ask(*[40] * 16)
    served.run_until_decoding(*rows)
    usual_s = sorted(served.gaps(served.run(30)))[15]
    served.ask(16_000, 16_000)
    assert sorted(served.gaps(served.run(60)))[58] <= 2.2 * usual_s


@pytest.mark.parametrize(("token_count", "pass_s"), [(256, 0.012), (2048, 0.014)])
def test_tokens_that_cost_next_to_nothing_are_taken(token_count: int, pass_s: float) -> None:
    """A pass takes 10 ms for one token."""
    costs = Costs(fixed_s=0.010, token_s=(pass_s - 0.010) / token_count)
    served = gpu(Quirks(runs_ahead=True), costs=costs)
    rows = served.ask(*[40] * 4)
    served.run_until_decoding(*rows)
    served.run(30)
    (prompt,) = served.ask(60_000)
    steps = served.run_until_decoding(prompt)
    largest = max(chunk.stop - chunk.start for step in steps for chunk in step.chunks)
    assert largest >= token_count
    assert len(steps) <= 60_000 / token_count + 12


def cpu(quirks: Quirks) -> Served:
    """Return a CPU whose server has served a prompt of five tokens and some decode."""
    served = Served(CPU, CPU_LIMITS, quirks)
    (first,) = served.ask(5)
    served.run_until_decoding(first)
    served.run(20)
    served.end(first)
    return served


@cpus
def test_a_cpu_prefills_at_its_rate(quirks: Quirks) -> None:
    served = cpu(quirks)
    served.serve(*[2000] * 8)
    steps = served.serve(*[2000] * 8)
    assert served.seconds_of(steps) <= 1.55 * best_s(CPU, *[2000] * 8, pass_token_count=512)
    served.serve(*[40] * 64)
    steps = served.serve(*[40] * 64)
    assert served.seconds_of(steps) <= 1.55 * best_s(CPU, *[40] * 64, pass_token_count=512)


@cpus
def test_on_a_cpu_tokens_of_16_rows_come_evenly_beside_a_long_prompt(quirks: Quirks) -> None:
    served = cpu(quirks)
    alone_s = served.seconds_of(served.serve(4000))
    rows = served.ask(*[40] * 16)
    served.run_until_decoding(*rows)
    usual_s = sorted(served.gaps(served.run(30)))[15]
    (prompt,) = served.ask(4000)
    gaps = sorted(served.gaps(served.run_until_decoding(prompt)))
    assert gaps[int(0.99 * len(gaps))] <= 2.2 * usual_s
    assert sum(gaps) <= 3.5 * alone_s


@pytest.mark.parametrize(("most", "shape_count"), [(8_000, 64), (32_000, 192)])
@pytest.mark.parametrize("arrival_count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_arrivals_without_end_come_to_few_shapes_of_attention(
    arrival_count: int, most: int, shape_count: int
) -> None:
    """Some of them behind a cached prefix, some beside rows that decode."""
    dice = random.Random(5)
    served = gpu(Quirks(noise=0.3), costs=H200)
    for _ in range(arrival_count // 8):
        prompts = served.ask(*(int(most ** dice.random()) for _ in range(8)))
        for prompt in prompts:
            if dice.random() < 0.5:
                prompt.processed_token_count = dice.randrange(len(prompt.input_token_ids))
        before = len(served.steps)
        served.run_until_decoding(*prompts)
        kept = dice.sample(prompts, dice.choice((0, 0, 3)))
        served.end(*(s for s in served.scheduler.decoding if s not in kept))
        for step in served.steps[before:]:
            for chunk in step.chunks:
                assert chunk.token_count <= 2048
                assert chunk.is_last or chunk.stop % 64 == 0
    assert len(served.shapes) <= shape_count
