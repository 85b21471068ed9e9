"""Start on a terminal, as somebody sees it who sits there: what it does, where to ask, and no log."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.fixtures.models.folder import tiny_model_dir

REVISION = "1" * 40
COMMAND = (sys.executable, "-m", "icehouse_server.cli.main")


class Terminal:
    """A program on a terminal of its own, and all that was written there."""

    def __init__(self, command: list[str], environ: Mapping[str, str]) -> None:
        self._screen, inside = pty.openpty()
        self.process = subprocess.Popen(
            command, env=environ, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
        )
        os.close(inside)
        self._written = b""

    @property
    def text(self) -> str:
        """What was written, without colours and the cursor's moves."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self._written.decode())

    def close(self) -> None:
        """End the program, if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._screen)

    def read_until(self, words: str | None) -> str:
        """Read until these words have come, or the program has ended; return all there was."""
        while words is None or words not in self.text:
            try:
                piece = os.read(self._screen, 4096)
            except OSError:  # nobody writes any more
                piece = b""
            if not piece:
                assert words is None, self.text
                break
            self._written += piece
        return self.text


def user_environ(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "ICEHOUSE_", "NO_COLOR"))}
    path = os.pathsep.join(path for path in sys.path if path)
    homes = {"HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    return kept | homes | {"PYTHONPATH": path, "TERM": "xterm"}


def put_into_hub_cache(model: Path, hub_home: Path) -> None:
    kept = hub_home / "hub" / "models--org--tiny"
    shutil.copytree(model, kept / "snapshots" / REVISION)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(REVISION)


def test_a_start_is_told_in_words_and_its_model_is_in_use(tmp_path: Path) -> None:
    put_into_hub_cache(tiny_model_dir(tmp_path, "llama"), tmp_path / "hf")
    environ = user_environ(tmp_path)
    options = ["org/tiny", "--port", "0", "--http-port", "0", "--cache-directory", str(tmp_path / "blocks")]
    terminal = Terminal([*COMMAND, "serve", *options], environ)
    try:
        terminal.read_until("try: icehouse chat")
        listed = subprocess.run(
            [*COMMAND, "ls", "--json"], env=environ, capture_output=True, text=True, check=True
        )
        terminal.process.send_signal(signal.SIGINT)
        text = terminal.read_until(None)
        assert terminal.process.wait() == 0
    finally:
        terminal.close()
    steps = [
        *("Checking port and cache directory", "Looking up org/tiny on the hub", "Reading the tokenizer"),
        *(r"Loading org/tiny \([\d.]+ [KM]iB\)", "Warming up"),
        r"Ready: localhost:\d+ · http://localhost:\d+/v1 · try: icehouse chat --address localhost:\d+\n",
        *("Stopping: ", "Stopped"),
    ]
    assert re.search(".*".join(steps), text, re.DOTALL), text
    assert not re.search(r"open_files|was_clean|http_|serving_started|\w+=", text), text
    assert [(each["name"], each["is_in_use"]) for each in json.loads(listed.stdout)["models"]] == [
        ("org/tiny", True)
    ]


def test_who_asks_for_the_log_gets_it_and_a_refusal_is_one_line(tmp_path: Path) -> None:
    environ = user_environ(tmp_path)
    for options, words in ((["--log-level", "info"], "open_files_"), ([], "Checking port")):
        terminal = Terminal([*COMMAND, "serve", "./nowhere", "--port", "0", *options], environ)
        text = terminal.read_until(None)
        assert terminal.process.wait() == 1
        terminal.close()
        assert words in text and text.rstrip().splitlines()[-1].startswith(
            "icehouse: there is no model folder"
        )
