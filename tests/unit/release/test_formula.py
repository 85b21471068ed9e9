"""The Homebrew formula: made of a release, with every stanza it needs, and nothing left to fill in."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from release import version
from release.formula import FormulaError, Wheel, formula

VERSION = version.current()
ARTIFACTS, PROJECT = "https://example.com/icehouse/v1", "https://example.com/icehouse"
OURS = [
    f"python/{name}-{VERSION}-py3-none-any.whl"
    for name in ("icehouse", "icehouse_client", "icehouse_http", "icehouse_protos")
]
WHEELS = [
    *OURS,
    "homebrew/wheels/mlx-0.32.4-cp311-cp311-macosx_14_0_arm64.whl",
    "homebrew/wheels/mlx_metal-0.32.4-py3-none-macosx_14_0_arm64.whl",
    "homebrew/wheels/safetensors-0.8.0-cp39-abi3-macosx_11_0_arm64.whl",
    "homebrew/wheels/MarkupSafe-3.0.4-cp311-cp311-macosx_10_9_universal2.whl",
    "homebrew/wheels/six-1.17.0-py2.py3-none-any.whl",
]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Return the folder of a release whose wheels are files of their own names."""
    for name in WHEELS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def made(release: Path, *, artifact_url: str = ARTIFACTS, project_url: str = PROJECT) -> str:
    return formula(version=VERSION, release=release, artifact_url=artifact_url, project_url=project_url)


def blocks(text: str) -> list[str]:
    """Return the names of the formula's blocks, and prove that each one ends."""
    opened, found = 0, []
    for line in text.splitlines():
        code = line.partition("#")[0].strip()
        if re.match(r"(class|def)\b|.*\bdo$", code):
            opened += 1
            found.append(re.sub(r" do$", "", code))
        elif code == "end":
            opened -= 1
            assert opened >= 0
    assert opened == 0
    return found


def test_it_has_every_stanza(release: Path) -> None:
    text = made(release)
    for stanza in ("desc", "homepage", "url", "version", "sha256", "license", "depends_on"):
        assert re.search(rf'^  {stanza} ["\w]', text, re.MULTILINE), stanza
    assert {"class Icehouse < Formula", "def install", "service", "test"} <= set(blocks(text))
    assert f'version "{VERSION}"' in text and 'license "Apache-2.0"' in text
    assert f'homepage "{PROJECT}"' in text
    described = re.findall(r'^  desc "(.*)"', text, re.MULTILINE)[0]
    # What `brew audit` asks of a description.
    assert len(described) <= 80 and not described.endswith(".") and not described.startswith(("A ", "An "))


def test_nothing_is_left_to_fill_in(release: Path) -> None:
    text = made(release)
    assert not re.search(r"@\w*@|TO" + r"DO|REPLACE|PLACEHOLDER|0{64}", text)
    assert '"python@3.11"' in text and 'opt_bin/"python3.11"' in text
    assert set(re.findall(r"https?://[^\"\s]+", text)) == {
        PROJECT,
        *(f"{ARTIFACTS}/{name}" for name in WHEELS),
    }


def test_every_wheel_of_the_release_is_fetched_with_its_sum(release: Path) -> None:
    pairs = re.findall(r'url "([^"]+)", using: :nounzip\n(?:  version .*\n)?\s+sha256 "(\w+)"', made(release))
    assert dict(pairs) == {
        f"{ARTIFACTS}/{name}": hashlib.sha256(name.encode()).hexdigest() for name in WHEELS
    }
    names = re.findall(r'resource "([^"]+)" do', made(release))
    assert sorted(names) == sorted(
        [
            "icehouse-client",
            "icehouse-http",
            "icehouse-protos",
            "mlx",
            "mlx-metal",
            "safetensors",
            "markupsafe",
            "six",
        ]
    )


@pytest.mark.parametrize(
    "wheel",
    [
        "mlx-0.32.4-cp311-cp311-manylinux_2_35_x86_64.whl",
        "mlx-0.32.4-cp312-cp312-macosx_14_0_arm64.whl",
        "mlx-0.32.4-cp311-cp311-macosx_15_0_arm64.whl",
        "mlx-0.32.4-cp311-cp311-macosx_14_0_x86_64.whl",
        "x-1-cp312-abi3-macosx_11_0_arm64.whl",
    ],
)
def test_a_wheel_that_no_such_mac_installs_is_refused(wheel: str, release: Path) -> None:
    (release / "homebrew" / "wheels" / wheel).write_text("")
    assert not Wheel(release / wheel, "").fits
    with pytest.raises(FormulaError, match="no Mac with Python"):
        made(release)


def test_two_wheels_of_one_name_are_refused(release: Path) -> None:
    (release / "homebrew" / "wheels" / "six-1.18.0-py3-none-any.whl").write_text("")
    with pytest.raises(FormulaError, match="more than one wheel of six"):
        made(release)


def test_a_release_of_another_version_is_refused(release: Path) -> None:
    (release / OURS[0]).rename(release / "python" / "icehouse-9.9.9-py3-none-any.whl")
    with pytest.raises(FormulaError, match=f"icehouse {re.escape(VERSION)}"):
        made(release)


@pytest.mark.parametrize("url", ["http://x.test/a", "x.test", "https://", 'https://x.test/"; system "rm', ""])
def test_an_address_is_one_and_nothing_more(url: str, release: Path) -> None:
    with pytest.raises(FormulaError, match="no https address"):
        made(release, artifact_url=url)
    with pytest.raises(FormulaError, match="no https address"):
        made(release, project_url=url)


@pytest.mark.skipif(shutil.which("ruby") is None, reason="ruby is not here")
def test_ruby_reads_it(release: Path, tmp_path: Path) -> None:
    (path := tmp_path / "icehouse.rb").write_text(made(release))
    done = subprocess.run(["ruby", "-c", "-w", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
