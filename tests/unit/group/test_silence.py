"""Who has said nothing for how long: beats of one's own, not the clock."""

from __future__ import annotations

from icehouse_server.group.silence import BEAT_S, SILENCE_S, Silence

LIMIT = int(SILENCE_S / BEAT_S)


def test_who_says_nothing_for_too_long_is_silent() -> None:
    silence: Silence[int] = Silence()
    silence.hear(1)
    assert [silence.beat() for _ in range(LIMIT)] == [[]] * LIMIT
    assert silence.beat() == [1]
    silence.hear(1)
    assert silence.beat() == []


def test_who_is_excused_is_not_silent_until_heard_again() -> None:
    silence: Silence[int] = Silence()
    silence.hear(1)
    silence.hear(2)
    for _ in range(LIMIT):
        silence.beat()
    silence.excuse(1)
    silence.excuse(3)
    assert silence.beat() == [2]
    silence.hear(1)
    assert [silence.beat() for _ in range(LIMIT)] == [[2]] * LIMIT
    assert silence.beat() == [1, 2] or silence.beat() == [2, 1]
