"""Known vulnerabilities of what is installed, and a bill of materials of it: `make audit`.

Usage: python .ci/audit.py --python PATH --sbom FILE. Runs in an environment of its own, which has
pip-audit and cyclonedx-py, so that the tools are not in the bill. The exit code is 1 only when a
vulnerability was found or the bill could not be written. Where no service with such data answers,
nothing was audited: that is said, in capitals, and is no failure of the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("pypi", "osv")
TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Audit:
    """What one service said."""

    audited_count: int
    skipped_count: int
    findings: tuple[str, ...]


def read_report(report: dict[str, Any]) -> Audit:
    """Return what pip-audit's JSON says. A package it skipped was not audited, whatever its exit code."""
    audited = [entry for entry in report["dependencies"] if "skip_reason" not in entry]
    findings = [
        f"{entry['name']} {entry['version']}: {vulnerability['id']}"
        f" (mended in {', '.join(vulnerability['fix_versions']) or 'no version yet'})"
        for entry in audited
        for vulnerability in entry["vulns"]
    ]
    return Audit(len(audited), len(report["dependencies"]) - len(audited), tuple(findings))


def ask(service: str, requirements: Path) -> Audit | None:
    """Ask one vulnerability service about every pinned package; None when it does not answer."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(requirements), "--no-deps"]
    command += ["--disable-pip", "--format", "json", "--vulnerability-service", service, "--timeout", "10"]
    command += ["--progress-spinner", "off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        return read_report(json.loads(done.stdout))
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        return None


def verdict(audits: Sequence[Audit | None]) -> tuple[str, int]:
    """Return what to print and the exit code, from what the services said, the first useful one last."""
    heard = [audit for audit in audits if audit is not None and audit.audited_count]
    if not heard:
        return (
            "NOT AUDITED: no vulnerability service answered for any package; run this where one can be "
            "reached. No vulnerability was looked for, so none was ruled out.",
            0,
        )
    audit = heard[-1]
    lines = [f"{audit.audited_count} packages audited, {len(audit.findings)} vulnerabilities"]
    if audit.skipped_count:
        lines.append(f"{audit.skipped_count} packages NOT audited: the service does not know them")
    return "\n".join([*lines, *audit.findings]), 1 if audit.findings else 0


def pinned(python: str, file: Path) -> None:
    """Write what is installed for `python` as requirements, our own packages left out."""
    command = [python, "-m", "pip", "list", "--format", "freeze", "--exclude-editable"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    file.write_text(lines, encoding="utf-8")


def write_bill(python: str, file: Path) -> bool:
    """Write the CycloneDX bill of materials of everything installed for `python`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cyclonedx_py", "environment", python]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"]
    command += ["--output-reproducible", "--of", "JSON", "-o", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return False
    bill = json.loads(file.read_text(encoding="utf-8"))
    print(f"bill of materials: {len(bill['components'])} components in {file}")
    return bool(bill["components"])


def main() -> int:
    """Run both; the exit code says whether something must be done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="the interpreter whose packages are looked at")
    parser.add_argument("--sbom", type=Path, required=True, help="where the bill of materials goes")
    arguments = parser.parse_args()
    has_bill = write_bill(arguments.python, arguments.sbom)
    requirements = arguments.sbom.with_suffix(".requirements.txt")
    pinned(arguments.python, requirements)
    audits: list[Audit | None] = []
    for service in SERVICES:
        audits.append(ask(service, requirements))
        if (latest := audits[-1]) is not None and latest.audited_count:
            break
    text, code = verdict(audits)
    print(text)
    return code if has_bill else 1


if __name__ == "__main__":
    sys.exit(main())
