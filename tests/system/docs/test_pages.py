"""Pages of docs/, the README and the Python client's: their Python runs, and commands beside a live server.

A page's shell blocks come first, in order, in one folder, then its Python as one program.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import pytest

from tests.fixtures.models.adapters import tiny_adapter_dir
from tests.fixtures.pages import CLIENT_PAGE, Block, blocks_of, program_of
from tests.fixtures.pages.desk import Desk
from tests.fixtures.pages.marks import BY_HAND, PAGES, all_shell_blocks, lacking
from tests.fixtures.pages.servers import Caller, models_named, serve_and_ask, shells_of, starts_a_server
from tests.fixtures.rpc.authority import Authority, dns
from tests.system.docs.conftest import HAS_VISION, Place
from tests.system.mesh.envoy import free_ports
from tests.tidy.tree import ROOT

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]

RUN = {page: [block for block in blocks_of(page) if block.is_run] for page in (*PAGES, CLIENT_PAGE)}
RUN = {page: blocks for page, blocks in RUN.items() if blocks}

SERVERS = {"tools.md": "calling", "tenants.md": "secured", "running.md": "secured"}
"""Which server a page's calls are answered by, where it is not the plain one."""

SHOWN_BLOCK = "109cd310"

EXPECTED: Mapping[str, tuple[str, ...]] = {
    "README.md": (r"(\d+) of \d+ prompt tokens", "first token in about", r"\nok +cache "),
    "clients/python/README.md": (
        r"-- [1-9]\d* of \d+ prompt tokens were cached",
        r"[1-9]\d* prompt tokens came from the cache",
        r"\n36\n(yes|no)\nAda 37\n",
        "NOT_FOUND MODEL_NOT_FOUND",
    ),
    "start.md": (r"\d+ of \d+ prompt tokens were cached",),
    "chat.md": (r"-- [1-9]\d+ of \d+ prompt tokens cached", r"\bmessages\n", r"\nTrue\n"),
    "tools.md": (r"get_weather \{'city': 'Oslo'\}", r"call 0 get_weather", r"\b0\n"),
    "json.md": (
        r"(mathematician|programmer|other)\n",
        r"(mathematician|programmer|other) Person\n",
        r"the output ended with LENGTH before it was complete '",
        r"(yes|no)\n",
        r"\d{4}-\d\d-\d\d\n",
        "RESPONSE_FORMAT_INVALID",
    ),
    "rag.md": (r"4 vectors of \d+", r"0\.\d{3} "),
    "adapters.md": (r"False\nADAPTER_NOT_FOUND", '"poetry"'),
    "shared-prefix.md": (r"[1-9]\d+ of \d+ from the cache", r"[1-9]\d+ of \d+ from the handbook's"),
    "tenants.md": ("OPERATOR_ONLY", "BEGIN CERTIFICATE|icehouse|tenant"),
    "cache.md": (
        r"[1-9]\d* tokens from RAM",
        r"region kv: ",
        r"[1-9]\d* blocks, .* read, 0 damaged",
        r"exported: [1-9]\d* blocks",
    ),
    "prefill.md": (r"NO_MATCH|DIVERGED", r"NONE|DIVERGED"),
    "troubleshooting.md": ("nothing to repair", ", 0 damaged"),
    "terminal.md": (r"[1-9]\d* from RAM", r"pinned: [1-9]\d* blocks", r'"speeds": \['),
    "running.md": (r"ExecStart=.* serve demo\n", "ActiveState: active", "removed: ", "slowest"),
    "kubernetes.md": ("tenant=agents",),
    "openai.md": ("did you mean 'max_output_tokens'",),
}
"""What a page's output must have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Who follows a page: where, beside which server, with which tiny models."""

    desk: Desk
    place: Place
    models: Mapping[str, Path]
    left: Path
    """The cache directory of a server that was stopped."""

    @property
    def variables(self) -> dict[str, str]:
        """Return where the page's server is."""
        return {"ICEHOUSE_CLIENT_ADDRESS": self.place.address}

    def put_files(self) -> None:
        """Put what callers of the page's server have where the page names it."""
        for name, content in self.place.files.items():
            (self.desk.folder / name).write_bytes(content)


def _handbook(reader: Reader) -> None:
    (reader.desk.folder / "handbook.txt").write_text("Ice is cut in January.\n" * 20, encoding="utf-8")


def _terminal(reader: Reader) -> None:
    (reader.desk.folder / "more-questions.txt").write_text("And water?\n", encoding="utf-8")
    _handbook(reader)
    reader.desk.put_model("MODEL", reader.models["plain"])


def _cache(reader: Reader) -> None:
    shutil.copytree(reader.left, reader.desk.blocks)
    _handbook(reader)


def _troubleshooting(reader: Reader) -> None:
    assert reader.place.blocks is not None
    reader.desk.blocks.parent.mkdir(parents=True)
    reader.desk.blocks.symlink_to(reader.place.blocks)


def _adapters(reader: Reader) -> None:
    for seed, name in enumerate(("poetry", "legal")):
        tiny_adapter_dir(reader.desk.folder, reader.models["plain"], seed=seed, name=name)


def _images(reader: Reader) -> None:
    (reader.desk.folder / "pictures").mkdir()


def _tenants(reader: Reader) -> None:
    """Do what the page says in words: each line of `token new` goes to its owner's file."""
    token, line = reader.desk.shell("icehouse token new --tenant search", {}).splitlines()
    for name, text in (("token", token), ("tokens", line)):
        (reader.desk.folder / name).write_text(f"{text}\n", encoding="utf-8")
        (reader.desk.folder / name).chmod(0o600)


def _running(reader: Reader) -> None:
    if sys.platform != "linux":
        pytest.skip("the stand-in for the service manager is one for systemd")
    (port,) = free_ports(1)
    (reader.desk.folder / "icehouse.toml").write_text(f"[server]\nport = {port}\n", encoding="utf-8")
    reader.desk.put_model("demo", reader.models["plain"])
    reader.desk.add_program("systemctl", SYSTEMCTL)
    (reader.desk.folder / "ca.crt").write_bytes(reader.place.files["server.pem"])
    (reader.desk.folder / ".icehouse-token").write_bytes(reader.place.files["token"])


def _start(reader: Reader) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("there is no repository here to clone")


def _readme(reader: Reader) -> None:
    reader.desk.put_model("demo", reader.models["plain"])


PREPARED: Mapping[str, Callable[[Reader], None]] = {
    "README.md": _readme,
    "adapters.md": _adapters,
    "cache.md": _cache,
    "images.md": _images,
    "running.md": _running,
    "start.md": _start,
    "tenants.md": _tenants,
    "terminal.md": _terminal,
    "troubleshooting.md": _troubleshooting,
}
"""What a page takes for granted, by its name."""

SYSTEMCTL = """\
#!/bin/sh
case "$*" in
*" restart "*)
    command=$(sed -n 's/^ExecStart=//p' ~/.config/systemd/user/icehouse.service)
    setsid timeout --foreground 600 $command > ~/service.log 2>&1 < /dev/null &
    echo $! > ~/service.pid
    timeout 300 tail -n +1 -F --pid $! ~/service.log 2> /dev/null | grep -q -m 1 serving_started
    ;;
*" disable --now "*)
    kill "$(cat ~/service.pid)"
    timeout 300 tail -f --pid "$(cat ~/service.pid)" /dev/null
    grep -q server_drained ~/service.log
    ;;
*" show "*) [ ! -e ~/service.pid ] || printf 'ActiveState=active\nMainPID=%s\n' "$(cat ~/service.pid)" ;;
esac
"""
"""Starts what the unit says and waits until it serves; stops it in order."""


def test_every_page_with_code_has_what_its_output_must_have() -> None:
    assert {name_of(page) for page in RUN} >= set(EXPECTED)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_runs(
    page: Path, places: Mapping[str, Place], models: Mapping[str, Path], left: Path, desk: Desk
) -> None:
    place = places[SERVERS.get(page.name, "plain")]
    reader = Reader(desk, place, models, left)
    if page.name in PREPARED:
        PREPARED[page.name](reader)
    output = ""
    for block in RUN[page]:
        if block.mark == "run: serve":
            serve(block, reader)
        elif block.language == "sh":
            output += desk.shell(as_here(block.text, reader), reader.variables)
    reader.put_files()
    if python := [block for block in RUN[page] if block.language == "python"]:
        program = program_of(python, place.address, calling=places["calling"].address)
        output += desk.run([sys.executable, "-W", "error", "-c", program], reader.variables)
    for pattern in EXPECTED.get(name_of(page), ()):
        assert re.search(pattern, output), f"{pattern!r} is not in what {page.name} prints:\n{output[-3000:]}"


@pytest.mark.parametrize(
    "block",
    [block for block in all_shell_blocks() if lacking(block)],
    ids=lambda b: f"{b.page.name}:{b.line}",
)
def test_what_is_left_to_people(block: Block) -> None:
    pytest.skip(f"{block.text.splitlines()[0]} ...: needs {lacking(block)}; {BY_HAND[lacking(block)]}")


def serve(block: Block, reader: Reader) -> None:
    """Start each server of a block as it stands, ask it, and stop it."""
    for lines in shells_of(as_here("\n".join(block.commands), reader).splitlines()):
        assert starts_a_server(lines[-1]), f"{block.page.name}:{block.line} serves nothing: {lines[-1]}"
        model = models_named(lines[-1])
        seeing = "VL" in model or "--image" in lines[-1]
        if seeing and not HAS_VISION:
            continue
        reader.desk.put_model(model, reader.models["seeing" if seeing else "plain"])
        (port,) = free_ports(1)
        serve_and_ask(lines, reader.desk, port=port, caller=caller_of(lines[-1], reader.desk))
        shutil.rmtree(reader.desk.folder / "icehouse", ignore_errors=True)


def as_here(text: str, reader: Reader) -> str:
    """Return a block's text with what differs from machine to machine: an address, a block's name, a path."""
    others = {
        "models.example.com:50051": reader.place.address,
        "/srv/pictures": str(reader.desk.folder / "pictures"),
        "<this repository>": shlex.quote(str(ROOT)),
        # Who is at a terminal is asked.
        "evict --all": "evict --all --yes",
        "purge --unused-days 30": "purge --unused-days 30 --yes",
        # Made from nothing by the same target when the tests' own environment was made.
        "make env": "ln -s ../.venv .venv && touch .venv/.stamp-dev && make env",
    }
    if blocks := sorted(reader.desk.blocks.glob("blocks/*/*.safetensors")):
        others[SHOWN_BLOCK] = blocks[0].name[: len(SHOWN_BLOCK)]
    for shown, here in others.items():
        text = text.replace(shown, here)
    return text


def caller_of(line: str, desk: Desk) -> Caller:
    """Return how a server is asked that was started so."""
    if "--tls-certificate" not in line:
        return Caller()
    root = (desk.folder / "server.pem").read_bytes()
    if "--tls-client-ca" not in line:
        token = (desk.folder / "token").read_text(encoding="utf-8").strip()
        return Caller(grpc.ssl_channel_credentials(root), (("authorization", f"Bearer {token}"),))
    authority = Authority()
    (desk.folder / "clients-ca.pem").write_bytes(authority.pem)
    certificate, key = authority.issue("client", dns("search"))
    return Caller(grpc.ssl_channel_credentials(root, key, certificate))


def name_of(page: Path) -> str:
    """Return what a page is known by here."""
    return page.relative_to(ROOT).as_posix() if page == CLIENT_PAGE else page.name
