"""What the demo sends, and how it ends.

The table of the demo: its numbers, its bars, its width, and the verdict on the texts.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from icehouse_client import Usage
from icehouse_server.cli import main as cli
from icehouse_server.cli.local import demo
from icehouse_server.cli.local.demo import DemoCall, comparison_table, texts_are_equal, verdict_text
from rich.console import Console
from typer.testing import CliRunner


def test_the_long_prompt_ends_inside_a_sentence_it_has_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ((False, None, 750), (True, Path("/lib/libopenblas.so.0"), 500), (True, None, 250))
    for is_cpu, library, words in cases:
        monkeypatch.setattr(demo, "runs_on_cpu", lambda answer=is_cpu: answer)
        monkeypatch.setattr(demo, "find_openblas", lambda found=library: found)
        prompt = demo.long_prompt()
        last_words = prompt.rpartition('"')[2]
        assert not prompt.endswith((".", "\n"))
        assert prompt.count(last_words) >= 2 and len(last_words) > 20
        assert words <= len(prompt.split()) < words + 100


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_differing_texts_are_an_exit_code(monkeypatch: pytest.MonkeyPatch, is_equal: bool, code: int) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda **given: is_equal)
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == code


def usage(*, ttft_s: float, ram: int = 0, ssd: int = 0) -> Usage:
    return Usage(
        prompt_tokens=1000,
        cached_tokens=ram + ssd,
        ram_tokens=ram,
        ssd_tokens=ssd,
        output_tokens=16,
        queue_s=0.0,
        restore_s=0.0,
        prefill_s=ttft_s,
        decode_s=1.0,
        ttft_s=ttft_s,
        total_s=ttft_s + 1.0,
    )


def passes(*texts: str) -> list[DemoCall]:
    costs = (usage(ttft_s=12.0), usage(ttft_s=0.1, ram=999), usage(ttft_s=3.0, ram=1, ssd=998))
    return [DemoCall(*each) for each in zip(("cold", "from RAM", "from SSD"), texts, costs, strict=True)]


def shown(*texts: str) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=False)
    console.print(comparison_table(passes(*texts)))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_bars_are_in_proportion_and_fit_80_columns() -> None:
    header, *rows = shown("a", "a", "a")
    assert "first token" in header and all(len(line) <= 80 for line in rows)
    assert [row.count("█") for row in rows] == [20, 0, 5]


def test_rows_say_what_came_from_where() -> None:
    _, cold, ram, ssd = shown("a", "a", "a")
    assert "12,000 ms" in cold and "0 of 1,000" in cold
    assert "999 RAM of 1,000" in ram
    assert "1 RAM + 998 SSD of 1,000" in ssd


def test_equal_texts_are_said_to_be_equal() -> None:
    assert texts_are_equal(passes("a", "a", "a"))
    line = verdict_text(passes("a", "a", "a")).plain
    assert "equal" in line and "from RAM 120 × sooner" in line and "from SSD 4.0 × sooner" in line


def test_one_other_text_or_none_at_all_is_a_failure() -> None:
    for texts in (("a", "b", "a"), ("a", "a", "b"), ("", "", "")):
        assert not texts_are_equal(passes(*texts))
        assert "differ" in verdict_text(passes(*texts)).plain
