"""Make gen/python from the protos, or with --check fail when the committed code is stale.

Messages, their typed interfaces and the service stubs come from the protoc inside
`grpcio-tools` and the `mypy-protobuf` plugins, so nothing outside the Python environment is
needed. The same input and versions give the same bytes. With --descriptors PATH it writes what
Envoy's transcoder and grpcurl's -protoset read instead: the whole API and the details of its errors.
"""

from __future__ import annotations

import argparse
import filecmp
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import google.rpc  # type: ignore[import-untyped]

PROTO_DIR = pathlib.Path(__file__).resolve().parent
OUTPUT_DIR = PROTO_DIR.parent / "gen" / "python"
PACKAGE_DIR = pathlib.Path("icehouse")


def generate(output_dir: pathlib.Path) -> None:
    """Write the whole package into `output_dir`; raises CalledProcessError when protoc refuses."""
    proto_files = sorted(str(path.relative_to(PROTO_DIR)) for path in PROTO_DIR.rglob("*.proto"))
    service_files = [path for path in proto_files if path.endswith("_service.proto")]
    output_dir.mkdir(parents=True, exist_ok=True)
    _run_protoc(["python", "mypy"], proto_files, output_dir)
    _run_protoc(["grpc_python", "mypy_grpc"], service_files, output_dir)
    for folder in (PACKAGE_DIR, PACKAGE_DIR / "v1"):
        (output_dir / folder / "__init__.py").write_text('"""Generated from protos/; never edited."""\n')
    (output_dir / PACKAGE_DIR / "py.typed").write_text("")


def describe(path: pathlib.Path) -> None:
    """Write a FileDescriptorSet of the API, of all it imports and of google.rpc's error details."""
    proto_files = sorted(str(path.relative_to(PROTO_DIR)) for path in PROTO_DIR.rglob("*.proto"))
    common_dir = pathlib.Path(next(iter(google.rpc.__path__))).parents[1]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO_DIR}"]
    command += [f"--proto_path={common_dir}", "--include_imports"]
    command += [f"--descriptor_set_out={path.resolve()}", *proto_files, "google/rpc/error_details.proto"]
    subprocess.run(command, check=True, cwd=PROTO_DIR)


def _run_protoc(generators: list[str], proto_files: list[str], output_dir: pathlib.Path) -> None:
    scripts_dir = pathlib.Path(sysconfig.get_path("scripts"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO_DIR}"]
    for generator in generators:
        if generator.startswith("mypy"):
            command += [f"--plugin=protoc-gen-{generator}={scripts_dir / f'protoc-gen-{generator}'}"]
            command += [f"--{generator}_out=quiet:{output_dir}"]
        else:
            command += [f"--{generator}_out={output_dir}"]
    subprocess.run([*command, *proto_files], check=True, cwd=PROTO_DIR)


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
    kept = {".py", ".pyi", ".typed"}
    return {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in kept}


def main() -> int:
    """Generate, or compare; return the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when gen/python is stale")
    parser.add_argument("--descriptors", type=pathlib.Path, help="write a descriptor set here, nothing else")
    arguments = parser.parse_args()
    if arguments.descriptors is not None:
        describe(arguments.descriptors)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        fresh_dir = pathlib.Path(temporary)
        generate(fresh_dir)
        if arguments.check:
            stale = stale_files(fresh_dir / PACKAGE_DIR, OUTPUT_DIR / PACKAGE_DIR)
            for path in stale:
                print(f"stale: gen/python/{PACKAGE_DIR / path}", file=sys.stderr)
            if stale:
                print("run `python protos/generate.py` and commit the result", file=sys.stderr)
            return 1 if stale else 0
        shutil.rmtree(OUTPUT_DIR / PACKAGE_DIR, ignore_errors=True)
        shutil.copytree(fresh_dir / PACKAGE_DIR, OUTPUT_DIR / PACKAGE_DIR)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
