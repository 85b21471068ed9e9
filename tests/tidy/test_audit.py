"""The audit says what it did, and above all what it did not."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.tidy.tree import ROOT


def load() -> Any:
    """Import the script, which lies in no package."""
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


audit = load()

SKIPPED = {"name": "mlx", "skip_reason": "not found"}
GOOD = {"name": "rich", "version": "15.0.0", "vulns": []}
BAD = {"name": "h11", "version": "0.1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["0.2"]}]}


def said(*reports: Any) -> tuple[str, int]:
    read = [None if r is None else audit.read_report({"dependencies": r}) for r in reports]
    text, code = audit.verdict(read)
    return text, code


def test_a_clean_audit_passes() -> None:
    assert said([GOOD]) == ("1 packages audited, 0 vulnerabilities", 0)


def test_a_vulnerability_fails_and_is_named_with_what_mends_it() -> None:
    text, code = said([GOOD, BAD])
    assert code == 1 and "h11 0.1: PYSEC-1 (mended in 0.2)" in text


def test_a_service_that_knows_nothing_is_not_a_clean_audit() -> None:
    for reports in ([SKIPPED, SKIPPED],), (None, None), ([SKIPPED], None), ([],):
        text, code = said(*reports)
        assert code == 0 and text.startswith("NOT AUDITED"), reports


def test_what_was_skipped_is_counted() -> None:
    text, code = said(None, [GOOD, SKIPPED])
    assert code == 0 and "1 packages NOT audited" in text
