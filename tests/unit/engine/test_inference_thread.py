"""Who is given turns, and when nobody is; engines are generators here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.engine.core.mailbox import Mailbox, Message, QueryStats
from icehouse_server.engine.inference_thread import InferenceThread

from tests.fixtures.engine import FakeClock
from tests.fixtures.patience import BOUND_S

QUESTION = QueryStats(lambda stats, cache: None)


class SteppedThread(InferenceThread):
    """A thread whose turns are taken by hand."""

    def __init__(self) -> None:
        self.fake = FakeClock()
        super().__init__(self.fake)
        self.turns: list[str] = []

    def mailbox(self) -> Mailbox[Message]:
        return Mailbox(limit=10, changed=self.changed)

    def join_in(
        self,
        name: str,
        *,
        step_s: float,
        count: int,
        wait_s: Callable[[], float | None],
        is_loading: Callable[[], bool] = lambda: False,
    ) -> None:
        def turns() -> Iterator[float | None]:
            for _ in range(count):
                self.turns.append(name)
                self.fake.now += step_s
                yield wait_s()

        self.add(turns(), self.mailbox(), is_loading=is_loading)

    def take(self, count: int) -> str:
        """Take so many turns; return whose they were."""
        self.turns.clear()
        for _ in range(count):
            member = self._next()
            assert member is not None
            self._take_turn(member)
        return "".join(self.turns)


def test_engines_get_the_same_time_however_long_their_turns_are() -> None:
    thread = SteppedThread()
    thread.join_in("a", step_s=3.0, count=1000, wait_s=lambda: None)
    thread.join_in("b", step_s=1.0, count=1000, wait_s=lambda: None)
    turns = thread.take(400)
    assert abs(3 * turns.count("a") - turns.count("b")) <= 3
    assert "bbbb" not in turns and "aa" not in turns, "nobody waits longer than for the other's turn"


def test_what_loads_gets_a_third_of_the_time_until_it_has_loaded() -> None:
    thread, is_loading = SteppedThread(), True
    thread.join_in("a", step_s=1.0, count=1000, wait_s=lambda: None)
    thread.join_in("b", step_s=0.25, count=1000, wait_s=lambda: None, is_loading=lambda: is_loading)
    turns = thread.take(300)
    assert abs(4 * turns.count("a") - 3 * turns.count("b")) <= 3
    assert "bbb" not in turns and "aa" not in turns
    is_loading = False
    turns = thread.take(300)
    assert abs(4 * turns.count("a") - turns.count("b")) <= 4


def test_who_was_idle_is_next_and_is_owed_nothing() -> None:
    thread = SteppedThread()
    thread.join_in("a", step_s=1.0, count=1000, wait_s=lambda: None)
    thread.take(500)
    thread.join_in("b", step_s=1.0, count=1000, wait_s=lambda: None)
    assert thread.take(20) in ("ab" * 10, "ba" * 10)


def test_who_waits_for_a_message_is_stepped_when_one_comes_or_its_time_is_over() -> None:
    thread = SteppedThread()
    thread.join_in("a", step_s=1.0, count=1000, wait_s=lambda: None)
    thread.join_in("b", step_s=0.0, count=1000, wait_s=lambda: 10.0)
    assert thread.take(2) in ("ab", "ba")
    assert thread.take(9) == "a" * 9, "b has nothing to do"
    thread._members[1].mailbox.post(QUESTION)
    thread._members[1].mailbox.take_all(timeout_s=0)
    assert thread.take(3).count("b") == 1, "its time is over"
    thread._members[1].mailbox.post(QUESTION)
    assert "b" in thread.take(2), "a message came"


def test_no_message_wakes_what_loads() -> None:
    thread, is_loading = SteppedThread(), True
    thread.join_in("a", step_s=1.0, count=1000, wait_s=lambda: None)
    thread.join_in("b", step_s=0.0, count=1000, wait_s=lambda: 10.0, is_loading=lambda: is_loading)
    thread.take(2)
    thread._members[1].mailbox.post(QUESTION)
    assert thread.take(9) == "a" * 9, "b would not read it"
    is_loading = False
    assert "b" in thread.take(2)


def test_a_turn_is_hurried_only_while_another_engine_has_something_to_do() -> None:
    thread = SteppedThread()
    thread.join_in("a", step_s=1.0, count=3, wait_s=lambda: None)
    thread.take(1)
    assert not thread.is_contended
    thread.join_in("b", step_s=1.0, count=3, wait_s=lambda: None)
    thread.take(1)
    assert thread.is_contended


def test_a_slow_turn_is_allowed_for_and_forgotten() -> None:
    thread = SteppedThread()
    steps_s = iter([5.0])
    thread.join_in("a", step_s=5.0, count=1, wait_s=lambda: next(steps_s))
    thread.take(1)
    assert thread.step_allowance_s == 20.0, "a turn may take a few times the longest of late"
    thread.join_in("b", step_s=0.01, count=1000, wait_s=lambda: None)
    thread.take(1000)
    assert thread.step_allowance_s < 1.0, "one slow chunk long ago does not hide a stuck turn"


def test_an_engine_whose_mailbox_would_not_wake_the_thread_is_refused() -> None:
    with pytest.raises(AssertionError, match="wake"):
        SteppedThread().add(iter(()), Mailbox(limit=1))


def test_the_thread_sleeps_until_a_message_and_ends_when_told_once_nobody_is_left() -> None:
    thread = InferenceThread(SystemClock())
    mailbox: Mailbox[Message] = Mailbox(limit=1, changed=thread.changed)
    woken, released = threading.Event(), threading.Event()

    def turns() -> Iterator[float | None]:
        yield BOUND_S
        assert mailbox.take_all(timeout_s=0) == [QUESTION]
        woken.set()

    thread.release = released.set
    thread.start()
    thread.add(turns(), mailbox)
    thread.end()
    assert not released.is_set(), "an engine is left"
    mailbox.post(QUESTION)
    assert woken.wait(BOUND_S)
    assert thread.join(timeout_s=BOUND_S) and released.is_set()
