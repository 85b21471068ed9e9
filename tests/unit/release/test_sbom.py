"""Bills of materials: what is needed, nothing that only developers need, the same for the same input."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import zipfile
from pathlib import Path

import pytest

from release import sbom

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: 1.0
"""


def wheel(folder: Path, name: str, *needs: str) -> Path:
    """Write a wheel of metadata alone."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    lines = METADATA.format(name=name) + "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", lines)
    return path


def found(site: Path) -> set[str]:
    """Return the distributions that a Python with this folder alone would see."""
    return {sbom._normal(d.metadata["Name"]) for d in importlib.metadata.distributions(path=[str(site)])}


def test_it_is_of_what_is_needed_here_and_of_extras_that_are_asked_for(tmp_path: Path) -> None:
    other = wheel(tmp_path, "our_client", 'pytest; extra == "test"', 'jinja2>=3; extra == "more"')
    first = wheel(
        tmp_path,
        "our-server",
        "our-client[more]==1.0",
        "Rich>=1",
        'pytest; extra == "dev"',
        'nowhere-to-be-had; sys_platform == "other"',
    )
    python = sbom.runtime_environment(tmp_path / "environment", [first, other])
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    names = found(site)
    assert python.exists() and {"our-server", "our-client", "rich", "markdown-it-py", "jinja2"} <= names
    assert not {"pytest", "pip", "mypy", "icehouse"} & names


def test_what_is_needed_and_not_here_is_said(tmp_path: Path) -> None:
    with pytest.raises(sbom.SbomError, match="nowhere-to-be-had is needed"):
        sbom.runtime_environment(tmp_path / "e", [wheel(tmp_path, "ours", "nowhere-to-be-had")])


def bill(**more: object) -> dict[str, object]:
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"name": "a"}], **more}


def test_what_differs_from_run_to_run_is_taken_out() -> None:
    one = bill(serialNumber="urn:uuid:1", metadata={"timestamp": "now", "tools": []})
    other = bill(serialNumber="urn:uuid:2", metadata={"timestamp": "later", "tools": []})
    assert sbom.normalized(one) == sbom.normalized(other)
    assert json.loads(sbom.normalized(one))["metadata"] == {"tools": []}


@pytest.mark.parametrize("wrong", [bill(components=[]), bill(bomFormat="other"), {}])
def test_a_bill_of_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(sbom.SbomError, match="components"):
        sbom.normalized(wrong)


def test_a_bill_that_names_a_folder_of_this_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(bill(metadata={"component": {"purl": f"file://{tmp_path}/x"}})))
    with pytest.raises(sbom.SbomError, match="a folder of this machine"):
        sbom.finish([path], tools=Path(sys.executable), private=[tmp_path])


def test_our_go_modules_have_the_version_of_the_release() -> None:
    ours = {"name": "icehouse.dev/icehouse", "purl": "pkg:golang/icehouse.dev/icehouse?type=module"}
    api = {
        "name": "icehouse.dev/api",
        "version": "v0.0.1",
        "purl": "pkg:golang/icehouse.dev/api@v0.0.1?type=module",
    }
    other = {"name": "golang.org/x/net", "version": "v0.60.0", "purl": "pkg:golang/golang.org/x/net@v0.60.0"}
    made = sbom.with_our_version(bill(metadata={"component": ours}, components=[api, dict(other)]), "v1.2.3")
    assert made["metadata"]["component"]["purl"] == "pkg:golang/icehouse.dev/icehouse@v1.2.3?type=module"
    assert made["components"] == [
        {
            "name": "icehouse.dev/api",
            "version": "v1.2.3",
            "purl": "pkg:golang/icehouse.dev/api@v1.2.3?type=module",
        },
        other,
    ]
