"""The door: bounded for work, open for control, shut once."""

from __future__ import annotations

import threading

from icehouse_server.engine.core.mailbox import Mailbox

from tests.fixtures.patience import BOUND_S


def test_work_is_bounded_and_control_is_not() -> None:
    mailbox: Mailbox[str] = Mailbox(limit=2)
    assert mailbox.offer("a") and mailbox.offer("b")
    assert not mailbox.offer("c")
    assert all(mailbox.post(f"cancel {i}") for i in range(10))
    assert mailbox.take_all(timeout_s=0)[:3] == ["a", "b", "cancel 0"]
    assert mailbox.offer("c"), "taking makes room"


def test_work_of_several_parts_fits_as_a_whole_or_not_at_all() -> None:
    mailbox: Mailbox[str] = Mailbox(limit=3)
    assert mailbox.offer("two", work_count=2)
    assert not mailbox.offer("two more", work_count=2)
    assert mailbox.offer("one")
    assert mailbox.take_all(timeout_s=0) == ["two", "one"]


def test_take_all_waits_for_another_thread() -> None:
    mailbox: Mailbox[str] = Mailbox(limit=1)
    taken: list[str] = []
    reader = threading.Thread(target=lambda: taken.extend(mailbox.take_all(timeout_s=BOUND_S)))
    reader.start()
    mailbox.post("late")
    reader.join(BOUND_S)
    assert taken == ["late"]


def test_closing_returns_the_rest_and_refuses_more() -> None:
    mailbox: Mailbox[str] = Mailbox(limit=5)
    mailbox.offer("left behind")
    assert mailbox.close() == ["left behind"]
    assert not mailbox.offer("x") and not mailbox.post("y")
    assert mailbox.take_all(timeout_s=0) == []
