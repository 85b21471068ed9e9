"""The API's image: what would break callers of the last release is noticed, what only grows is not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from release import api_image

REMOVED_FIELD = (r"^  int32 max_output_tokens = \d+;\n", "", "max_output_tokens")
BREAKS = {
    "a field is gone": REMOVED_FIELD,
    "a field has another number": (
        r"^  int32 max_output_tokens = \d+;",
        "  int32 max_output_tokens = 999;",
        "max_output_tokens",
    ),
    "a field has another type": (r"^  int32 max_output_tokens", "  int64 max_output_tokens", "int64"),
    "a field has another name": (r"^  int32 max_output_tokens", "  int32 token_limit", "token_limit"),
    "a method is gone": (r"^  rpc Tokenize\(.*\n", "", "Tokenize"),
}


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """Return a copy of protos/."""
    return shutil.copytree(api_image.PROTOS, tmp_path / "protos")


def change(protos: Path, pattern: str, text: str) -> None:
    """Replace the one place of the inference service's file where `pattern` is."""
    path = protos / "icehouse" / "v1" / "inference_service.proto"
    changed, count = re.subn(pattern, text, path.read_text("utf-8"), count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(changed, "utf-8")


def test_the_api_has_what_the_last_release_has() -> None:
    api_image.check()


@pytest.mark.parametrize(("pattern", "text", "named"), BREAKS.values(), ids=BREAKS)
def test_what_would_break_callers_is_named(protos: Path, pattern: str, text: str, named: str) -> None:
    change(protos, pattern, text)
    with pytest.raises(api_image.BrokenApi, match=rf"inference_service\.proto:\d+:\d+:.*{named}"):
        api_image.check(protos)


def test_a_new_field_breaks_nobody_until_it_is_released(protos: Path, tmp_path: Path) -> None:
    image = Path(shutil.copy(api_image.IMAGE, tmp_path))
    change(
        protos,
        r"^message GenerateRequest \{\n",
        "message GenerateRequest {\n  // New.\n  bool brand_new = 999;\n",
    )
    api_image.check(protos, image)
    api_image.renew(protos, image)
    with pytest.raises(api_image.BrokenApi, match="brand_new"):
        api_image.check(api_image.PROTOS, image)


def test_a_release_that_breaks_callers_has_no_image(protos: Path, tmp_path: Path) -> None:
    image = Path(shutil.copy(api_image.IMAGE, tmp_path))
    change(protos, *REMOVED_FIELD[:2])
    with pytest.raises(api_image.BrokenApi, match="max_output_tokens"):
        api_image.renew(protos, image)
    assert image.read_bytes() == api_image.IMAGE.read_bytes()


def test_protos_that_do_not_compile_are_no_image(protos: Path, tmp_path: Path) -> None:
    change(protos, r"^message GenerateRequest \{", "message GenerateRequest {{")
    with pytest.raises(api_image.BrokenApi, match="unmatched"):
        api_image.renew(protos, tmp_path / "new.binpb")
    assert not (tmp_path / "new.binpb").exists()
