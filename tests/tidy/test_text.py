"""What no file of the repository may say, and what README and pages promise."""

from __future__ import annotations

import re

from icehouse_server.cli import cache_directory as cache
from icehouse_server.cli import main as cli
from icehouse_server.cli.flags import value_text
from icehouse_server.config import SETTINGS

from tests.tidy.tree import ROOT, text_files

# Spelled in pieces, so that this file does not find itself.
FORBIDDEN = {
    "an absolute home folder": re.compile(r"/(?:home|Users)/(?!you\b)[a-z]\w*/|/" + r"root/\w"),
    "a work folder of some machine": re.compile(r"(?<![\w.])/" + r"work/(?:main|shared)|/tmp/" + r"v/env"),
    "a merge conflict": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
    # No index has the packages yet: what somebody puts there under these names is not ours.
    "a package of ours by name": re.compile(
        r"(?:pipx? install|uv add|uvx|uv tool install|npm (?:i|install|add)|brew install|docker (?:pull|run)"
        r"|go install)(?: -{1,2}[\w-]+)* ['\"]?(?:@?icehouse\b(?!:)|icehouse\.dev)"
    ),
    "unfinished work": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
}


def test_no_file_names_this_machine_or_unfinished_work() -> None:
    found = [
        f"{path}: {what}: {match[0]!r}"
        for path, text in text_files()
        if path.name not in ("LICENSE", "constraints.txt")
        for what, pattern in FORBIDDEN.items()
        if (match := pattern.search(text))
    ]
    assert found == []


def test_go_is_told_where_the_modules_are_before_it_gets_them() -> None:
    for path, text in text_files():
        before, got, _ = text.partition("go get icehouse" + ".dev")
        told = ("-replace icehouse.dev/icehouse=", 'GOPROXY="file:')
        assert not got or any(way in before for way in told), path


def test_text_files_end_with_a_newline() -> None:
    assert [str(path) for path, text in text_files() if text and not text.endswith("\n")] == []


README = ROOT / "README.md"
PAGES = {path: path.read_text(encoding="utf-8") for path in (README, *sorted((ROOT / "docs").rglob("*.md")))}
SHOWN = "\n".join(PAGES.values())


def test_every_make_target_that_pages_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", PAGES[README])) <= targets
    named = set(re.findall(r"(?:^|`|&& (?:sudo )?)make ([a-z][a-z-]*)", SHOWN, re.MULTILINE))
    assert {"demo", "test", "check", "bench", "soak", "audit"} <= named <= targets


def test_the_readme_begins_with_the_two_commands() -> None:
    commands = re.findall(r"^(make \w+)", PAGES[README], re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


def test_the_readme_is_short() -> None:
    # Marks of what runs a block are shown to nobody.
    assert sum(not line.startswith("<!-- ") for line in PAGES[README].splitlines()) <= 140


def test_every_command_that_pages_name_exists() -> None:
    functions = [(c.name, c.callback.__name__ if c.callback else "") for c in cli.app.registered_commands]
    commands = {name or function.replace("_", "-") for name, function in functions}
    commands |= {group.name or "" for group in cli.app.registered_groups}
    named = set(re.findall(r"`icehouse ([a-z]+(?:-[a-z]+)*)\b", SHOWN))
    assert {"serve", "demo", "generate", "doctor", "config"} <= named <= commands
    table = PAGES[ROOT / "docs" / "terminal.md"]
    assert [name for name in commands if f"`icehouse {name}" not in table and f"`{name}`" not in table] == []


def test_the_page_on_the_cache_shows_every_cache_command() -> None:
    commands = {c.name or (c.callback.__name__ if c.callback else "") for c in cache.app.registered_commands}
    page = PAGES[ROOT / "docs" / "cache.md"]
    assert set(re.findall(r"icehouse cache ([a-z]+)", page)) == commands


def test_the_tables_of_the_settings_page_have_every_setting_as_it_is() -> None:
    rows = [
        f"| `{s.key}` | `{s.flag}` | `{s.variable}` | {value_text(s, s.default)} | {s.help} |"
        for s in SETTINGS
    ]
    written = PAGES[ROOT / "docs" / "settings.md"].splitlines()
    assert [row for row in written if row.startswith("| `") and "ICEHOUSE_" in row] == rows


def test_make_help_shows_the_usual_targets_and_every_target_says_what_it_does() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"[a-z-]+", text.partition(".PHONY:")[2].partition("\n")[0]))
    told = set(re.findall(r"^([a-z-]+):.* #{1,2} ", text, re.MULTILINE))
    helped = re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE)
    assert phony == told and len(helped) <= 20


def test_every_bench_that_is_named_exists() -> None:
    text = (ROOT / "Makefile").read_text()
    cases = set(text.partition("CASES := ")[2].partition("MODULE_")[0].replace("\\", "").split())
    named = {
        case
        for path, page in text_files()
        if path.suffix in (".md", ".py")
        for case in re.findall(r"make bench CASE=([a-z]+)", page)
    }
    assert {"cache", "gpu", "growth"} <= named <= cases
    modules = dict(re.findall(r"^MODULE_([a-z]+) := (.+)$", text, re.MULTILINE))
    for case in cases:
        path = ROOT / "bench" / modules.get(case, case).replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), case
