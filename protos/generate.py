"""Make gen/ from the protos, or with --check fail when the committed code is stale.

gen/python: messages, their typed interfaces and the service stubs come from the protoc inside an old
`grpcio-tools`, which pip brings (PYTHON_PROTOC), and the `mypy-protobuf` plugins: what a protoc makes runs
with the protobuf and grpcio of its time and with newer ones, so newer code would ask every caller for them.
gen/go and gen/ts: the protoc of the environment with plugins that go and npm bring, in the versions pinned by
protos/plugins/go.mod and TS_PLUGIN. gen/java: a protoc and a plugin that Maven brings, in the versions of the
runtime in clients/java/pom.xml, for the same reason. Where a tool chain is
missing that folder is left alone, and a line says so. The same input and versions give the same bytes.

With --descriptors PATH it writes what Envoy's transcoder and grpcurl's -protoset read instead: the
whole API and the details of its errors.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence

import google.rpc  # type: ignore[import-untyped]
import grpc_tools

PROTO_DIR = pathlib.Path(__file__).resolve().parent
OUTPUT_DIR = PROTO_DIR.parent / "gen"
PACKAGE_DIR = pathlib.Path("icehouse")
API_DIR = PACKAGE_DIR / "v1"
GROUP_DIR = PACKAGE_DIR / "group" / "v1"
"""What the ranks of a group say to each other: no caller's, so it is made for Python alone."""
PLUGIN_DIR = PROTO_DIR / "plugins"
TS_PLUGIN = "@bufbuild/protoc-gen-es@2.17.0"
"""The npm package; clients/node has the runtime of the same version."""

PYTHON_PROTOC = "grpcio-tools==1.67.1"
"""Of October 2024; it makes code of protobuf 5.27.2. The floors of gen/python and clients/python."""

ERROR_PROTOS = ["google/rpc/error_details.proto", "google/rpc/status.proto"]

JAVA_POM = PROTO_DIR.parent / "clients" / "java" / "pom.xml"
JAVA_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
_JAVA_SYSTEMS = {"Linux": "linux", "Darwin": "osx"}
_JAVA_MACHINES = {"x86_64": "x86_64", "aarch64": "aarch_64", "arm64": "aarch_64"}

_SUFFIXES = {".py", ".pyi", ".typed", ".go", ".ts", ".java"}
_TOOL_TIMEOUT_S = 300.0
"""A plugin is built or fetched the first time."""


class ToolMissing(Exception):
    """A language's tool chain is not here; says which part."""


def generate(output_dir: pathlib.Path) -> None:
    """Write the Python package into `output_dir`; raises ToolMissing without a pip that can bring protoc."""
    tools = OUTPUT_DIR.parent / "build" / "protoc" / PYTHON_PROTOC
    if not (tools / "grpc_tools").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        _answer_of([*command, "--only-binary=:all:", f"--target={tools}", PYTHON_PROTOC])
    output_dir.mkdir(parents=True, exist_ok=True)
    for folder in (API_DIR, GROUP_DIR):
        _run_protoc(["python", "mypy"], _proto_files(folder=folder), output_dir, tools)
        _run_protoc(
            ["grpc_python", "mypy_grpc"], _proto_files("*_service.proto", folder=folder), output_dir, tools
        )
    for folder in (PACKAGE_DIR, API_DIR, GROUP_DIR.parent, GROUP_DIR):
        (output_dir / folder / "__init__.py").write_text('"""Generated from protos/; never edited."""\n')
    (output_dir / PACKAGE_DIR / "py.typed").write_text("")


def generate_go(output_dir: pathlib.Path) -> None:
    """Write the Go package into `output_dir`; raises ToolMissing without a Go that can build the plugins."""
    for plugin, proto_files in (("go", _proto_files()), ("go-grpc", _proto_files("*_service.proto"))):
        tool = _answer_of(["go", "-C", str(PLUGIN_DIR), "tool", "-n", f"protoc-gen-{plugin}"])
        options = [f"--plugin=protoc-gen-{plugin}={tool}", f"--{plugin}_opt=paths=source_relative"]
        _protoc(*options, f"--{plugin}_out={output_dir}", *proto_files)


def generate_ts(output_dir: pathlib.Path) -> None:
    """Write the TypeScript messages, with those of google.rpc's errors; raises ToolMissing without npm."""
    tool = _answer_of(["npm", "exec", "--yes", f"--package={TS_PLUGIN}", "--", "which", "protoc-gen-es"])
    options = [f"--plugin=protoc-gen-es={tool}", "--es_opt=target=ts,import_extension=js"]
    _protoc(*options, f"--es_out={output_dir}", *_proto_files(), *ERROR_PROTOS)


def generate_java(output_dir: pathlib.Path) -> None:
    """Write the Java messages and stubs; raises ToolMissing without a Maven that can bring the programs."""
    versions = dict(re.findall(r"<(grpc|protobuf)\.version>(.+?)<", JAVA_POM.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as scratch:
        tools = pathlib.Path(scratch)
        protoc = _maven_program("com.google.protobuf:protoc", versions["protobuf"], tools)
        plugin = _maven_program("io.grpc:protoc-gen-grpc-java", versions["grpc"], tools)
        # Those inside grpcio-tools know google/protobuf/*.proto by themselves.
        options = [f"--proto_path={next(iter(grpc_tools.__path__))}/_proto", f"--java_out={output_dir}"]
        options += [f"--plugin=protoc-gen-grpc={plugin}", f"--grpc_out=@generated=omit:{output_dir}"]
        _protoc(*options, *_proto_files(), program=[str(protoc)])


def _maven_program(artifact: str, version: str, folder: pathlib.Path) -> pathlib.Path:
    """Put a program that Maven brings into `folder`, in the build for this machine."""
    try:
        build = f"{_JAVA_SYSTEMS[platform.system()]}-{_JAVA_MACHINES[platform.machine()]}"
    except KeyError as name:
        raise ToolMissing(f"there is no {artifact} for {name}") from None
    command = ["mvn", "--quiet", "--batch-mode", "--no-transfer-progress", JAVA_COPY]
    _answer_of([*command, f"-Dartifact={artifact}:{version}:exe:{build}", f"-DoutputDirectory={folder}"])
    program = folder / f"{artifact.partition(':')[2]}-{version}-{build}.exe"
    program.chmod(0o700)
    return program


def describe(path: pathlib.Path) -> None:
    """Write a FileDescriptorSet of the API, of all it imports and of google.rpc's error details."""
    _protoc("--include_imports", f"--descriptor_set_out={path.resolve()}", *_proto_files(), ERROR_PROTOS[0])


def describe_with_comments(path: pathlib.Path) -> list[str]:
    """Write a FileDescriptorSet of the API alone, comments included; return its files in order."""
    files = _proto_files()
    _protoc("--include_source_info", f"--descriptor_set_out={path.resolve()}", *files)
    return files


LANGUAGES = {"python": generate, "go": generate_go, "ts": generate_ts, "java": generate_java}
"""Folder in gen/ -> what fills it."""


def _proto_files(pattern: str = "*.proto", *, folder: pathlib.Path = API_DIR) -> list[str]:
    return sorted(str(path.relative_to(PROTO_DIR)) for path in (PROTO_DIR / folder).glob(pattern))


def _run_protoc(
    generators: list[str], proto_files: list[str], output_dir: pathlib.Path, tools: pathlib.Path
) -> None:
    scripts_dir = pathlib.Path(sysconfig.get_path("scripts"))
    options = []
    for generator in generators:
        if generator.startswith("mypy"):
            options += [f"--plugin=protoc-gen-{generator}={scripts_dir / f'protoc-gen-{generator}'}"]
            options += [f"--{generator}_out=quiet:{output_dir}"]
        else:
            options += [f"--{generator}_out={output_dir}"]
    _protoc(*options, *proto_files, tools=tools)


def _protoc(
    *arguments: str,
    program: Sequence[str] = (sys.executable, "-m", "grpc_tools.protoc"),
    tools: pathlib.Path | None = None,
) -> None:
    """Run a protoc over the API and google.rpc: that of grpcio-tools, of the one in `tools` if given."""
    common_dir = pathlib.Path(next(iter(google.rpc.__path__))).parents[1]
    paths = [f"--proto_path={PROTO_DIR}", f"--proto_path={common_dir}"]
    environ = dict(os.environ) if tools is None else {**os.environ, "PYTHONPATH": str(tools)}
    subprocess.run([*program, *paths, *arguments], check=True, cwd=PROTO_DIR, env=environ)


def _answer_of(command: list[str]) -> str:
    """Return what a tool prints; raises ToolMissing when it is not here or cannot do its work here."""
    if shutil.which(command[0]) is None:
        raise ToolMissing(f"there is no {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise ToolMissing(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def stale_files(fresh_dir: pathlib.Path, committed_dir: pathlib.Path) -> list[str]:
    """Return the paths that differ, are missing or are left over, relative to both folders."""
    fresh = _files(fresh_dir)
    committed = _files(committed_dir)
    differing = {
        path
        for path in fresh & committed
        if not filecmp.cmp(fresh_dir / path, committed_dir / path, shallow=False)
    }
    return sorted(str(path) for path in (fresh ^ committed) | differing)


def _files(folder: pathlib.Path) -> set[pathlib.Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in _SUFFIXES}


def _replace(fresh_dir: pathlib.Path, committed_dir: pathlib.Path) -> None:
    """Put the fresh packages in the place of the committed ones; what lies beside them stays."""
    for package in fresh_dir.iterdir():
        shutil.rmtree(committed_dir / package.name, ignore_errors=True)
        shutil.copytree(package, committed_dir / package.name)


def main() -> int:
    """Generate, or compare; return the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when gen/ is stale")
    parser.add_argument("--descriptors", type=pathlib.Path, help="write a descriptor set here, nothing else")
    arguments = parser.parse_args()
    if arguments.descriptors is not None:
        describe(arguments.descriptors)
        return 0
    stale: list[str] = []
    for language, fill in LANGUAGES.items():
        committed_dir = OUTPUT_DIR / language
        with tempfile.TemporaryDirectory() as temporary:
            fresh_dir = pathlib.Path(temporary)
            try:
                fill(fresh_dir)
            except ToolMissing as missing:
                print(f"gen/{language} was not looked at: {missing}", file=sys.stderr)
                continue
            if arguments.check:
                stale += [f"gen/{language}/{path}" for path in stale_files(fresh_dir, committed_dir)]
            else:
                _replace(fresh_dir, committed_dir)
    for path in stale:
        print(f"stale: {path}", file=sys.stderr)
    if stale:
        print("run `python protos/generate.py` and commit the result", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
