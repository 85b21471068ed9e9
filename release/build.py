"""Release: everything that is given out, with bills of materials and sums, in one folder.

Usage: make release ARGS="--project-url URL --artifact-url URL --without java". Publishing is left to people.
The folder has `python` (sdists, wheels), `node`, `go` (as a module proxy has it), `java` (as a Maven
repository has it), `api` (the image for `buf breaking`), `sbom`, and with --artifact-url `homebrew`;
SHA256SUMS is over all of it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from release import api_image, artifacts, checksums, formula, sbom, version, wheels_for_macs

LANGUAGES = ("node", "go", "java")
"""What can be left out where its tool chain is not here."""


def build(out: Path, arguments: argparse.Namespace) -> None:
    """Fill the new folder `out`; one line per step. Raises an error of the step that failed."""
    number = version.current()
    if stale := list(version.stale()):
        raise version.VersionError("; ".join(stale))
    api_image.check()
    with tempfile.TemporaryDirectory(prefix="icehouse-release-") as temporary:
        scratch = Path(temporary).resolve()
        tree = scratch / "tree"
        artifacts.copy_tree(tree, project_url=arguments.project_url, pages_url=arguments.pages_url)
        wheels = artifacts.build_python(tree, out / "python", scratch)
        print(f"python: {', '.join(wheel.name for wheel in wheels)}")
        if "node" not in arguments.without:
            artifacts.build_node(tree, out / "node")
            print("node: packed")
        if "go" not in arguments.without:
            artifacts.build_go(tree, out / "go", scratch, version=number)
            print(f"go: {', '.join(artifacts.GO_MODULES)}")
        if "java" not in arguments.without:
            artifacts.build_java(tree, out / "java", version=number)
            print("java: jar, sources, javadoc")
        _write_bills(out / "sbom", wheels, tree, scratch, arguments)
    (out / "api").mkdir()
    api_image.renew(image=out / "api" / f"icehouse-{number}.binpb")
    if arguments.artifact_url is not None:
        _write_formula(out, wheels, arguments)
    checksums.write(out)
    print(f"release {number}: {out}, sums in {checksums.NAME}")


def _write_bills(
    folder: Path, wheels: list[Path], tree: Path, scratch: Path, arguments: argparse.Namespace
) -> None:
    folder.mkdir()
    protos, client, front, server = wheels
    bills = {name: folder / f"{name}.cdx.json" for name in ("server", "python", "http", *LANGUAGES)}
    for name, own, project in (
        ("server", [server, front, client, protos], tree),
        ("python", [client, protos], tree / "clients/python"),
        ("http", [front, client, protos], tree / "clients/http"),
    ):
        place = scratch / f"sbom-{name}"
        place.mkdir()
        pyproject = project / "pyproject.toml"
        sbom.python_bill(bills[name], own, project=pyproject, tools=arguments.tools, scratch=place)
    makers = {"node": sbom.npm_bill, "go": sbom.go_bill, "java": sbom.maven_bill}
    made = [bills["server"], bills["python"], bills["http"]]
    for language, make in makers.items():
        if language not in arguments.without:
            make(bills[language], tree / "clients" / language)
            made.append(bills[language])
    sbom.finish(made, tools=arguments.tools, private=(scratch, artifacts.ROOT))
    print(f"sbom: {', '.join(bill.name for bill in made)}")


def _write_formula(out: Path, wheels: list[Path], arguments: argparse.Namespace) -> None:
    folder = out / "homebrew"
    constraints = artifacts.ROOT / "constraints.txt"
    wheels_for_macs.fetch(folder / "wheels", wheels, constraints=constraints, tools=arguments.tools)
    text = formula.formula(
        version=version.current(),
        release=out,
        artifact_url=arguments.artifact_url,
        project_url=arguments.project_url,
    )
    (folder / "icehouse.rb").write_text(text, encoding="utf-8")
    print(f"homebrew: icehouse.rb with {text.count('resource ') - 1} wheels")


def main() -> None:
    """Build; a step's failure is the exit message, and leaves no folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a new folder (default: dist/VERSION)")
    parser.add_argument("--tools", type=Path, required=True, help="the Python that has cyclonedx-py and uv")
    parser.add_argument("--project-url", help="where the project is at home; written into the packages")
    parser.add_argument("--pages-url", help="where files of this version can be read; READMEs link there")
    parser.add_argument("--artifact-url", help="where the folder will be; makes the Homebrew formula")
    parser.add_argument("--without", action="append", default=[], choices=LANGUAGES, help="leave out")
    arguments = parser.parse_args()
    if arguments.artifact_url is not None and arguments.project_url is None:
        parser.error("a formula has a homepage: --artifact-url needs --project-url")
    out = (arguments.out or artifacts.ROOT / "dist" / version.current()).resolve()
    if out.exists():
        parser.error(f"{out} is there already")
    # A path through a link would do; resolving it would lead out of the environment.
    arguments.tools = arguments.tools.absolute()
    try:
        build(out, arguments)
    except (
        version.VersionError,
        api_image.BrokenApi,
        artifacts.BuildError,
        sbom.SbomError,
        formula.FormulaError,
    ) as error:
        _fail(out, error)


def _fail(out: Path, error: Exception) -> NoReturn:
    shutil.rmtree(out, ignore_errors=True)
    sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()
