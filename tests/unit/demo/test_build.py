"""All or nothing: the folder is complete or absent, whatever happens midway."""

import json
from pathlib import Path

import pytest
from icehouse_server.demo import build
from icehouse_server.errors import ModelError, Reason


def fake_write(partial: Path, on_progress: build.OnProgress) -> str:
    on_progress("weights", 1.0)
    (partial / "config.json").write_text("{}")
    return "ab" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "_write_model", fake_write)
    monkeypatch.setattr(build, "package_installed", lambda: True)
    monkeypatch.setattr(build, "licence_notice", lambda: "a notice")
    return tmp_path / "models" / "gemma"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_build_leaves_one_complete_folder(folder: Path) -> None:
    assert not build.is_built(folder)
    assert build.ensure_demo_model(folder) == folder
    assert names(folder) == {"config.json", "icehouse.json", "NOTICE.md"}
    assert names(folder.parent) == {folder.name, ".build.lock"}
    assert json.loads((folder / "icehouse.json").read_text())["source_sha256"] == "ab" * 32


def test_a_second_run_reuses_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.ensure_demo_model(folder)

    def refuse(partial: Path, on_progress: build.OnProgress) -> str:
        raise AssertionError("built twice")

    monkeypatch.setattr(build, "_write_model", refuse)
    assert build.ensure_demo_model(folder) == folder


def test_a_crash_midway_leaves_nothing_that_looks_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(partial: Path, on_progress: build.OnProgress) -> str:
        (partial / "config.json").write_text("{}")
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(build, "_write_model", crash)
        build.ensure_demo_model(folder)
    assert not folder.exists()
    build.ensure_demo_model(folder)
    assert names(folder.parent) == {folder.name, ".build.lock"}


def test_a_folder_of_another_builder_is_replaced(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "icehouse.json").write_text('{"builder_version": 0}')
    (folder / "old").touch()
    build.ensure_demo_model(folder)
    assert "old" not in names(folder)
    assert names(folder.parent) == {folder.name, ".build.lock"}


def test_without_the_package_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "package_installed", lambda: False)
    with pytest.raises(ModelError, match=r"pip install -e '\.\[demo\]'") as caught:
        build.ensure_demo_model(folder)
    assert caught.value.reason is Reason.MODEL_NOT_FOUND


def test_a_place_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.parent.parent.joinpath("models").write_text("a file, not a folder")
    with pytest.raises(ModelError, match="cannot write the demo model"):
        build.ensure_demo_model(folder)


def test_damaged_chunks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        EXPECTED_SHA256 = "0" * 64

        @staticmethod
        def assemble(target: Path, overwrite: bool) -> None:
            target.write_bytes(b"not the model")

    monkeypatch.setattr("importlib.import_module", lambda name: Package)
    with pytest.raises(ModelError, match="damaged") as caught:
        build._assemble(tmp_path / "source.gguf", lambda phase, done: None)
    assert caught.value.reason is Reason.MODEL_INVALID
