"""Figures for people: sizes, durations, ages and shares in few characters."""

from __future__ import annotations

_SIZE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


def size_text(size_bytes: float) -> str:
    """Return a size: 34359738368 -> "32 GiB"."""
    for unit in _SIZE_UNITS[:-1]:
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} {_SIZE_UNITS[-1]}"


def duration_text(duration_s: float | None) -> str:
    """Return a duration in the unit that suits it: "34 ms", "2.31 s", "5 min"; "–" where there was none."""
    if duration_s is None:
        return "–"
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    return f"{duration_s:.2f} s" if duration_s < 120 else f"{duration_s / 60:.0f} min"


def age_text(age_s: float) -> str:
    """Return how long ago something was, in the largest unit that fits: "3 d", "12 min", "5 s"."""
    for unit_s, name in _AGES:
        if age_s >= unit_s:
            return f"{age_s / unit_s:.0f} {name}"
    return f"{max(0.0, age_s):.0f} s"


def share_text(share: float | None) -> str:
    """Return a part of a whole in percent; "–" where there is no whole."""
    return "–" if share is None else f"{share:.0%}"
