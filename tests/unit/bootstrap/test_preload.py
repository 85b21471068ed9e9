"""When the launcher starts itself again, and that it never does so twice."""

from pathlib import Path

import pytest
from icehouse_server.bootstrap import preload

LIBRARY = Path("/lib/libopenblas.so.0")


@pytest.fixture
def linux_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(preload, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(preload, "openblas_loaded", lambda: False)
    monkeypatch.setattr(preload, "find_openblas", lambda: LIBRARY)
    return monkeypatch


def test_openblas_goes_in_front_of_what_was_preloaded(linux_cpu: pytest.MonkeyPatch) -> None:
    environ = preload.preload_environment({"LD_PRELOAD": "/lib/other.so", "A": "b"})
    assert environ == {"LD_PRELOAD": f"{LIBRARY} /lib/other.so", "A": "b", "ICEHOUSE_PRELOADED": "1"}


def test_the_second_start_is_the_last(linux_cpu: pytest.MonkeyPatch) -> None:
    environ = preload.preload_environment({})
    assert environ is not None
    assert preload.preload_environment(environ) is None


@pytest.mark.parametrize(
    ("name", "answer"), [("runs_on_cpu", False), ("openblas_loaded", True), ("find_openblas", None)]
)
def test_nothing_happens_without_need_or_library(
    linux_cpu: pytest.MonkeyPatch, name: str, answer: object
) -> None:
    linux_cpu.setattr(preload, name, lambda: answer)
    assert preload.preload_environment({}) is None


def test_the_same_command_runs_again(linux_cpu: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    linux_cpu.setattr("os.execve", lambda *call: calls.append(call))
    linux_cpu.setattr("sys.orig_argv", ["python", "-X", "utf8", "/bin/icehouse", "serve"])
    linux_cpu.setattr(preload, "environment", dict)
    preload.restart_with_openblas()
    (_, arguments, environ) = calls[0]
    assert arguments[1:] == ["-X", "utf8", "/bin/icehouse", "serve"]
    assert environ["LD_PRELOAD"] == str(LIBRARY)
