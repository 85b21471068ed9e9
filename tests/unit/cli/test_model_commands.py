"""Models on this machine: fetched from a hub of the test's own, listed, removed where nobody uses them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from icehouse_server.bootstrap import kept_models
from icehouse_server.bootstrap.room import MachineResources, ModelSize, check_disk
from icehouse_server.demo.models import SMOLLM2
from icehouse_server.errors import ModelError, StartError

from tests.fixtures.hub import HUB_ID, REVISION, environment_of, hub_of
from tests.fixtures.patience import BOUND_S

FILES: Mapping[str, bytes] = {"config.json": b"{}", "model.safetensors": b"w" * 3000, "README.md": b"unasked"}


@pytest.fixture
def hub() -> Iterator[str]:
    with hub_of(FILES) as endpoint:
        yield endpoint


class Home:
    """A user's folder, with a hub that is asked from there."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self._environ = environment_of(folder, endpoint)
        self.snapshot = folder / "hf" / "hub" / "models--org--tiny" / "snapshots" / REVISION

    def run(self, *arguments: str, typed: str = "", **environ: str) -> tuple[int, str]:
        """Run `icehouse`; return its code and what it said."""
        command = [sys.executable, "-m", "icehouse_server.cli.main", *arguments]
        done = subprocess.run(
            command,
            env=self._environ | environ,
            input=typed,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


def test_a_model_is_pulled_listed_and_removed(tmp_path: Path, hub: str) -> None:
    home = Home(tmp_path, hub)
    assert home.run("ls") == (0, "no models on this machine; `icehouse pull` downloads one\n")
    code, said = home.run("pull", HUB_ID)
    assert code == 0 and "org/tiny: 2.932 KiB in " in said
    assert sorted(path.name for path in home.snapshot.iterdir()) == ["config.json", "model.safetensors"]
    [listed] = json.loads(home.run("ls", "--json")[1])["models"]
    assert (listed["name"], listed["size_bytes"], listed["is_in_use"]) == (HUB_ID, 3002, False)
    assert "nobody answered" in home.run("rm", HUB_ID)[1] and home.snapshot.is_dir()
    assert "Aborted" in home.run("rm", HUB_ID, typed="n\n")[1] and home.snapshot.is_dir()
    code, said = home.run("rm", HUB_ID, typed="y\n")
    assert code == 0 and "removed org/tiny" in said and not home.snapshot.exists()
    assert "there is no model 'org/tiny' here" in home.run("rm", HUB_ID, "--yes")[1]


def test_what_a_server_serves_is_kept(tmp_path: Path, hub: str) -> None:
    home = Home(tmp_path, hub)
    home.run("pull", HUB_ID)
    with kept_models.held(home.snapshot):
        code, said = home.run("rm", HUB_ID, "--yes")
        assert code == 1 and "in use by a server" in said and home.snapshot.is_dir()
        assert "in use" in home.run("ls")[1]
    assert home.run("rm", HUB_ID, "--yes")[0] == 0


def test_a_server_downloads_no_model_that_its_memory_cannot_hold(tmp_path: Path, hub: str) -> None:
    home = Home(tmp_path, hub)
    code, said = home.run("serve", HUB_ID, "--port", "0", "--no-ssd", "--memory-limit-bytes", "2000")
    assert code == 1 and "icehouse: the weights of org/tiny take 0.0 MiB" in said
    assert not home.snapshot.exists()


@pytest.mark.parametrize(
    ("name", "environ", "words"),
    [
        (HUB_ID, {"HF_ENDPOINT": "http://127.0.0.1:1"}, "the hub cannot be reached ("),
        (HUB_ID, {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached (HF_HUB_OFFLINE forbids it)"),
        ("org/other", {}, "the hub has no model org/other, or it is private"),
        ("./folder", {}, "'./folder' is not an id on the hub"),
    ],
)
def test_what_cannot_be_pulled_is_told_in_one_line(
    tmp_path: Path, hub: str, name: str, environ: dict[str, str], words: str
) -> None:
    code, said = Home(tmp_path, hub).run("pull", name, **environ)
    assert code == 1 and said.startswith("icehouse: ") and words in said and said.count("\n") == 1


def test_a_demo_model_is_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_models, "cached_repos", list)
    SMOLLM2.folder.mkdir(parents=True)
    (SMOLLM2.folder / "model.safetensors").write_bytes(b"12")
    assert kept_models.kept_models() == []
    (SMOLLM2.folder / "icehouse.json").write_text('{"builder_version": 1}')
    found = kept_models.find("demo")
    assert found.folder == SMOLLM2.folder and found.size_bytes == 24
    kept_models.remove(found)
    assert [path.name for path in SMOLLM2.folder.parent.iterdir()] == [".build.lock"]


def test_a_full_disk_and_a_small_memory_are_told_before_anything_is_fetched(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    large = ModelSize(weight_bytes=10, missing_bytes=2 * free_bytes, place=tmp_path / "not" / "yet")
    with pytest.raises(ModelError, match=r"org/tiny needs .* are free in .*icehouse rm"):
        check_disk(HUB_ID, large)
    room = MachineResources(memory_limit_bytes=20)
    room.check(HUB_ID, ModelSize(weight_bytes=20, missing_bytes=0, place=tmp_path))
    with pytest.raises(StartError, match="serve a smaller model"):
        room.check("draft", ModelSize(weight_bytes=1, missing_bytes=0, place=tmp_path))
