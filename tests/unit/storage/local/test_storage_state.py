"""The four states of the store, and the waits between two tries."""

from __future__ import annotations

from icehouse_server.storage.local.storage_state import StorageState, StoreStatus

from tests.fixtures.storage.storage_thread import settings_for


def test_it_is_closed_until_it_is_opened() -> None:
    state = StorageState(settings_for("/none"))
    assert (state.status, state.takes_blocks, state.is_usable) == (StoreStatus.CLOSED, False, False)
    assert not state.is_retry_due(now=1e9)
    state.open()
    assert state.takes_blocks and state.is_usable and not state.is_retry_due(now=1e9)


def test_each_failure_in_a_row_doubles_the_wait() -> None:
    state = StorageState(settings_for("/none"))
    waits, now = [], 0.0
    for number in range(9):
        if number % 2:
            state.fail(StoreStatus.FULL, "full", now=now, needed_bytes=10)
        else:
            state.fail(StoreStatus.BROKEN, "broken", now=now)
        waits.append(next(s for s in range(1, 100) if state.is_retry_due(now=now + s)))
        now += 100
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    state.open()
    state.note_write()
    state.fail(StoreStatus.BROKEN, "broken again", now=now)
    assert state.is_retry_due(now=now + 1)


def test_a_full_store_can_be_used_and_a_broken_one_cannot() -> None:
    state = StorageState(settings_for("/none"))
    state.fail(StoreStatus.FULL, "full", now=0.0, needed_bytes=10)
    assert (state.takes_blocks, state.is_usable, state.needed_bytes) == (False, True, 10)
    state.fail(StoreStatus.BROKEN, "broken", now=0.0)
    assert (state.takes_blocks, state.is_usable, state.needed_bytes) == (False, False, 0)
    state.close()
    assert (state.status, state.detail) == (StoreStatus.CLOSED, "")
