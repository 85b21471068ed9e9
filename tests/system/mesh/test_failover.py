"""Replicas die, drain and come back under load: who is hurt, and who is not."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence

import pytest
from icehouse_client import Client, IcehouseClientError, Options, Reply

from tests.fixtures.patience import BOUND_S
from tests.system.mesh.conftest import BLOCK, Fleet
from tests.system.mesh.test_edge import prompt

_OUTPUT_TOKENS = 60
_LONG_OUTPUT_TOKENS = 500


@dataclasses.dataclass(frozen=True)
class Ask:
    """One prompt, and what the fleet said to it in quiet times."""

    tokens: Sequence[int]
    reply: tuple[int, ...]


@pytest.fixture(scope="module")
def asks(fleet: Fleet) -> list[Ask]:
    prompts = [prompt(number, token_count=256 + 3) for number in range(40, 48)]
    with fleet.client() as client:
        return [Ask(tokens, _whole(client, tokens).token_ids) for tokens in prompts]


def _whole(client: Client, tokens: Sequence[int]) -> Reply:
    return client.generate(tokens, max_output_tokens=_OUTPUT_TOKENS)


def _busier(fleet: Fleet) -> int:
    """Return the port of the replica that took more requests."""
    counts = dict(zip(fleet.replicas, fleet.served_counts(), strict=True))
    return max(counts, key=lambda port: counts[port])


def _kill_busiest(fleet: Fleet) -> int:
    """Kill the replica with most calls in it, and return its port."""
    victim = fleet.envoy.busiest(active_count=2)
    fleet.replicas.pop(victim).kill()
    return victim


class Streams:
    """Streams of all prompts at once, through the edge; `run` acts in the middle of them."""

    def __init__(self, fleet: Fleet, asks: Sequence[Ask], *, output_tokens: int = _OUTPUT_TOKENS) -> None:
        self._fleet, self._asks, self._output_tokens = fleet, asks, output_tokens
        self._barrier = threading.Barrier(len(asks) + 1)

    def run(self, act: Callable[[], object]) -> list[tuple[Ask, tuple[int, ...] | IcehouseClientError]]:
        """Begin all, call `act` when each has its first text, then return how each ended."""
        with concurrent.futures.ThreadPoolExecutor(len(self._asks)) as pool:
            ends = [pool.submit(self._one, ask) for ask in self._asks]
            self._barrier.wait(BOUND_S)
            act()
            return [(ask, end.result()) for ask, end in zip(self._asks, ends, strict=True)]

    def _one(self, ask: Ask) -> tuple[int, ...] | IcehouseClientError:
        options: Options = {"max_output_tokens": self._output_tokens}
        with self._fleet.client() as client, client.stream(ask.tokens, **options) as stream:
            pieces = iter(stream)
            next(pieces)
            self._barrier.wait(BOUND_S)
            try:
                collections.deque(pieces, maxlen=0)
            except IcehouseClientError as error:
                return error
            return stream.reply.token_ids


def test_a_killed_replica_takes_only_its_own_streams(fleet: Fleet, asks: list[Ask]) -> None:
    before = dict(zip(fleet.replicas, fleet.served_counts(), strict=True))
    ends = Streams(fleet, asks, output_tokens=_LONG_OUTPUT_TOKENS).run(lambda: _kill_busiest(fleet))
    (survivor,) = fleet.replicas
    (victim,) = set(before) - {survivor}
    on_survivor = fleet.served_counts()[0] - before[survivor]
    finished = [tokens for _, tokens in ends if not isinstance(tokens, IcehouseClientError)]
    lost = [error for _, error in ends if isinstance(error, IcehouseClientError)]
    assert (len(finished), len(lost)) == (on_survivor, len(asks) - on_survivor) and lost
    # Cut in the middle: Envoy resets the stream, which callers see as the one or the other.
    assert {error.code.name for error in lost} <= {"INTERNAL", "UNAVAILABLE"}
    for ask, tokens in ends:
        if not isinstance(tokens, IcehouseClientError):
            assert tokens[:_OUTPUT_TOKENS] == ask.reply

    # Whoever asks now is served, wherever the prompt used to live.
    fleet.wait_until_healthy({survivor})
    with fleet.client() as client:
        assert [_whole(client, ask.tokens).token_ids for ask in asks] == [ask.reply for ask in asks]

    fleet.start(victim)
    fleet.wait_until_healthy({victim, survivor})


def test_no_generate_is_lost_when_a_replica_dies_in_the_middle(fleet: Fleet, asks: list[Ask]) -> None:
    begun = threading.Barrier(len(asks) + 1)

    def generate(ask: Ask) -> tuple[int, ...]:
        with fleet.client() as client:
            begun.wait(BOUND_S)
            return client.generate(ask.tokens, max_output_tokens=_LONG_OUTPUT_TOKENS).token_ids

    ports = set(fleet.replicas)
    with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool:
        answers = [pool.submit(generate, ask) for ask in asks]
        begun.wait(BOUND_S)
        victim = _kill_busiest(fleet)
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.result()[:_OUTPUT_TOKENS] == ask.reply
    fleet.start(victim)
    fleet.wait_until_healthy(ports)


@pytest.mark.slow
def test_a_drained_replica_finishes_and_comes_back_with_its_blocks(fleet: Fleet, asks: list[Ask]) -> None:
    ports = set(fleet.replicas)
    victims = []

    def stop_busiest() -> None:
        victims.append(fleet.envoy.busiest(active_count=2))
        fleet.replicas[victims[0]].terminate()

    with fleet.client() as client:
        for ask in asks:
            _whole(client, ask.tokens)
        ends = Streams(fleet, asks, output_tokens=_LONG_OUTPUT_TOKENS).run(stop_busiest)
        (victim,) = victims
        for ask, end in ends:
            assert not isinstance(end, IcehouseClientError), end
            assert end[:_OUTPUT_TOKENS] == ask.reply
        assert fleet.replicas[victim].wait() == 0
        fleet.wait_until_healthy(ports - {victim})
        assert [_whole(client, ask.tokens).token_ids for ask in asks] == [ask.reply for ask in asks]

        fleet.start(victim)
        fleet.wait_until_healthy(ports)
        replies = [_whole(client, ask.tokens) for ask in asks]
    assert [reply.token_ids for reply in replies] == [ask.reply for ask in asks]
    # The keys went back to the replica that knows them, and it knew them from its SSD.
    assert sum(reply.usage.ssd_tokens >= 256 // BLOCK * BLOCK for reply in replies) > 0
    assert min(reply.usage.cached_tokens for reply in replies) >= 256


def test_new_calls_go_elsewhere_at_once_while_a_replica_drains(fleet: Fleet, asks: list[Ask]) -> None:
    victim, ports = _busier(fleet), set(fleet.replicas)
    fleet.replicas[victim].terminate()
    # From the first moment on, before any health check has seen it: refused there, tried elsewhere.
    with fleet.client() as client:
        for ask in asks:
            with client.stream(ask.tokens, max_output_tokens=20) as stream:
                assert "".join(stream) is not None and stream.reply.token_ids == ask.reply[:20]
    assert fleet.replicas[victim].wait() == 0
    fleet.start(victim)
    fleet.wait_until_healthy(ports)
