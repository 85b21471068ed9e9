"""SIGTERM in the middle of a stream: what runs may finish, RAM goes to SSD, the next start is warm."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.offline import OfflineStore

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import CacheServer
from tests.system.cache.test_reuse import prompt
from tests.system.crash.crashing_server import ServerProcess
from tests.system.crash.generate_load import EventTrigger, Reference, Seen, ask
from tests.system.group.signals import signal_at_record

_BLOCK = 16
_OPTIONS = ("--block-token-count", str(_BLOCK), "--min-prefix-token-count", "0", "--no-restore-or-recompute")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "gemma3_text")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    tokens = prompt(5 * _BLOCK + 3)
    with CacheServer(model, None, is_enabled=False) as served:
        return Reference(tuple(tokens), tuple(served.ask("cold", tokens, max_output_tokens=60).tokens))


@pytest.mark.parametrize("grace_s", [30, 0], ids=["time to finish", "no time"])
def test_stopped_in_the_middle_of_a_stream(
    model: Path, reference: Reference, tmp_path: Path, grace_s: int
) -> None:
    directory = tmp_path / "blocks"
    options = (*_OPTIONS, "--drain-grace-s", str(grace_s))
    seen = Seen()
    with ServerProcess(model=model, directory=directory, log=tmp_path / "1.log", options=options) as server:
        server.wait_until_serving()
        trigger = EventTrigger(event_count=12, action=server.terminate)
        has_finished = ask(server.address, reference, seen, on_event=trigger.count)
        assert server.wait() == 0
    assert has_finished or grace_s == 0
    assert "abandoned" not in (tmp_path / "1.log").read_text()
    found, file_count = OfflineStore(str(directory), files=Files(), clock=SystemClock()).check(
        progress=lambda count: None
    )
    assert found == [] and file_count >= 5
    with ServerProcess(model=model, directory=directory, log=tmp_path / "2.log", options=options) as server:
        server.wait_until_serving()
        assert ask(server.address, reference, seen, on_event=lambda: None)
        server.terminate()
        assert server.wait() == 0
    assert seen.ssd_token_count >= 5 * _BLOCK


def stop_early(event: str, scratch: str) -> None:
    """Have a server send itself SIGTERM at an event of its start, with a folder for what is temporary."""
    os.environ["TMPDIR"], tempfile.tempdir = scratch, None
    signal_at_record(signal.SIGTERM, event)


@pytest.mark.parametrize("event", ["model_found", "tokenizer_read", "weights_read", "serving_started"])
def test_stopped_as_it_starts_it_leaves_nothing_behind(model: Path, tmp_path: Path, event: str) -> None:
    # The path of a socket there may have a hundred characters only.
    with tempfile.TemporaryDirectory(prefix="stop-") as scratch:
        with ServerProcess(
            model=model,
            directory=tmp_path / "blocks",
            log=tmp_path / "log",
            options=(*_OPTIONS, "--http-port", "0"),
            break_it=functools.partial(stop_early, event, scratch),
        ) as server:
            assert server.wait() == 0, (tmp_path / "log").read_text()
        assert "Traceback" not in (tmp_path / "log").read_text()
        assert not list(Path(scratch).glob("icehouse-*"))


def test_a_second_server_is_told_who_has_the_directory(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    directory = tmp_path / "blocks"
    second_log = tmp_path / "second.log"
    with ServerProcess(
        model=model, directory=directory, log=tmp_path / "first.log", options=_OPTIONS
    ) as first:
        first.wait_until_serving()
        with ServerProcess(model=model, directory=directory, log=second_log, options=_OPTIONS) as second:
            assert second.wait() not in (0, None)
        assert str(directory) in second_log.read_text() and str(first.pid) in second_log.read_text()
        # The first one goes on undisturbed.
        assert ask(first.address, reference, Seen(), on_event=lambda: None)
