"""What packages are built from: tracked files, with the licence and the project's address in each package."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from release import artifacts
from tests.tidy.test_links import links

URL = "https://example.com/icehouse"


def test_each_package_gets_the_licence_and_where_the_project_is_at_home(tmp_path: Path) -> None:
    artifacts.copy_tree(tmp_path, project_url=URL)
    for folder in (
        "gen/python",
        "clients/python",
        "clients/http",
        "clients/node",
        "gen/go",
        "clients/go",
        ".",
    ):
        assert (tmp_path / folder / "LICENSE").read_bytes() == (artifacts.ROOT / "LICENSE").read_bytes()
    for folder in artifacts.PYTHON_FOLDERS:
        project = tomllib.loads((tmp_path / folder / "pyproject.toml").read_text())["project"]
        assert project["urls"] == {"Homepage": URL} and project["license"] == "Apache-2.0"
    assert json.loads((tmp_path / "clients/node/package.json").read_text())["homepage"] == URL
    assert not (tmp_path / ".git").exists() and (tmp_path / "clients/node/src/gen").is_symlink()


@pytest.mark.parametrize(("project_url", "pages_url"), [(None, None), (URL, None), (URL, f"{URL}/blob/v1/")])
def test_a_readme_in_a_package_leads_nowhere_that_is_not_there(
    project_url: str | None, pages_url: str | None, tmp_path: Path
) -> None:
    artifacts.copy_tree(tmp_path, project_url=project_url, pages_url=pages_url)
    of_the_tree = {path: links((artifacts.ROOT / path).read_text()) for path in artifacts.READMES}
    assert all(any(not target.startswith("http") for target in targets) for targets in of_the_tree.values())
    for path in artifacts.READMES:
        for target in links((tmp_path / path).read_text()):
            assert target.startswith(("https://", "#")), (path, target)
            if target.startswith(f"{URL}/blob/v1/"):
                assert (artifacts.ROOT / target.removeprefix(f"{URL}/blob/v1/").partition("#")[0]).exists()
    node = (tmp_path / "clients/node/README.md").read_text()
    assert (f"client of [Icehouse]({URL}) " in node) == (project_url is not None)
    assert (f"[Images]({URL}/blob/v1/docs/howto/images.md)" in node) == (pages_url is not None)


def test_the_pom_has_what_maven_central_asks_for(tmp_path: Path) -> None:
    """As central.sonatype.org/publish/requirements lists it, but for the signatures."""
    artifacts.copy_tree(tmp_path, project_url=URL)
    pom = ElementTree.parse(tmp_path / "clients/java/pom.xml")
    wanted = ("groupId", "artifactId", "version", "name", "description", "url")
    below = ("licenses/license/name", "licenses/license/url", "developers/developer/name")
    for path in (*wanted, *below, "scm/url", "scm/connection"):
        text = pom.findtext("/".join(f"{{*}}{name}" for name in path.split("/")))
        assert text and "$" not in text, path
    assert pom.findtext("{*}url") == pom.findtext("{*}scm/{*}url") == URL
    plugins = pom.findall("{*}profiles/{*}profile[{*}id='release']//{*}artifactId")
    assert {plugin.text for plugin in plugins} == {"maven-source-plugin", "maven-javadoc-plugin"}


def test_the_jars_are_as_a_repository_of_mavens_has_them(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "target").mkdir(parents=True)
    (source / "pom.xml").write_text("abc")
    jars = [f"icehouse-client-1.2.3{suffix}.jar" for suffix in ("", "-javadoc", "-sources")]
    for name in (*jars, "other.jar"):
        (source / "target" / name).write_bytes(b"jar")
    artifacts.write_maven(out, source, version="1.2.3")
    place = out / "dev/icehouse/icehouse-client/1.2.3"
    made = [*jars, "icehouse-client-1.2.3.pom"]
    assert {path.name for path in place.iterdir()} == {f"{n}{s}" for n in made for s in ("", ".md5", ".sha1")}
    sums = [(place / f"icehouse-client-1.2.3.pom.{name}").read_text() for name in ("md5", "sha1")]
    assert sums == ["900150983cd24fb0d6963f7d28e17f72", "a9993e364706816aba3e25717850c26c9cd0d89d"]
    pom = ElementTree.parse(artifacts.ROOT / "clients/java/pom.xml")
    named = f"{pom.findtext('{*}groupId')}.{pom.findtext('{*}artifactId')}"
    assert named.split(".") == list(artifacts.JAVA_FOLDER.parts)


def test_a_go_module_is_as_a_proxy_has_it(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "below").mkdir(parents=True)
    (source / "go.mod").write_text("module example.com/x\n")
    (source / "below" / "a.go").write_text("package below\n")
    for folder in (out, tmp_path / "again"):
        artifacts.write_module(
            folder, source, module="example.com/x", version="v1.2.3", time="2026-01-02T03:04:05Z"
        )
    made = out / "example.com/x/@v"
    assert sorted(path.name for path in made.iterdir()) == ["list", "v1.2.3.info", "v1.2.3.mod", "v1.2.3.zip"]
    assert json.loads((made / "v1.2.3.info").read_text())["Version"] == "v1.2.3"
    with zipfile.ZipFile(made / "v1.2.3.zip") as archive:
        assert archive.namelist() == ["example.com/x@v1.2.3/below/a.go", "example.com/x@v1.2.3/go.mod"]
    again = tmp_path / "again" / "example.com/x/@v" / "v1.2.3.zip"
    assert again.read_bytes() == (made / "v1.2.3.zip").read_bytes()
