"""Everything that is imported is declared, so that a clean install brings it."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from typing import Any

from tests.tidy.tree import CLIENT, HTTP, ROOT, SERVER, imports_of, modules

OURS = {"icehouse_server", "icehouse", "icehouse_client", "icehouse_http", "tests", "bench"}


def project(path: str) -> dict[str, Any]:
    """Return the [project] table of a pyproject.toml."""
    return dict(tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"])


def names(requirements: list[str]) -> set[str]:
    """Return the normalized names in a list of requirements."""
    return {re.sub(r"[-_.]+", "-", re.split(r"[\s;<>=!~\[]", r)[0]).lower() for r in requirements}


def undeclared(folder: str, declared: set[str]) -> list[str]:
    """Return `path:line: module` of imports whose distribution is not among `declared`."""
    homes = importlib.metadata.packages_distributions()
    found = []
    for module in modules(folder):
        for line, name in imports_of(module):
            top = name.partition(".")[0]
            if top in OURS or top in sys.stdlib_module_names:
                continue
            if not names(homes.get(top, [top])) & declared:
                found.append(f"{module.path}:{line}: {name}")
    return found


def test_the_server_declares_what_it_imports() -> None:
    table = project("pyproject.toml")
    extras = table["optional-dependencies"]
    declared = names(table["dependencies"])
    for extra in ("encryption", "fleet", "otel", "shared", "vision"):
        declared |= names(extras[extra])
    # The SDK brings the API of the same version.
    declared |= {"opentelemetry-api"}
    assert undeclared(SERVER, declared) == []


def test_the_client_declares_what_it_imports() -> None:
    table = project("clients/python/pyproject.toml")
    declared = names(table["dependencies"])
    assert undeclared(CLIENT, declared | names(table["optional-dependencies"]["cli"])) == []


def test_the_http_front_declares_what_it_imports() -> None:
    assert undeclared(HTTP, names(project("clients/http/pyproject.toml")["dependencies"])) == []


def test_constraints_pin_every_dependency() -> None:
    table = project("pyproject.toml")
    extras = table["optional-dependencies"]
    wanted = names(table["dependencies"]) | names(extras["dev"]) | names(extras["vision"])
    wanted |= names(project("clients/http/pyproject.toml")["dependencies"])
    pinned = names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    assert wanted - pinned - {"icehouse", "icehouse-client", "icehouse-http", "icehouse-protos"} == set()


def test_the_cuda_build_that_is_named_is_of_the_pinned_mlx() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^mlx==(\S+)$", pins, re.MULTILINE)
    for path in ("docs/start.md", "deploy/docker/Dockerfile.cuda"):
        told = re.findall(r"mlx-cuda-1\d==([\d.]+)", (ROOT / path).read_text(encoding="utf-8"))
        assert set(told) == {version}, path
