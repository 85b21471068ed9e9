"""What makes gen/: it looks at the languages whose tool chains are here, and says which are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from protos import generate


@pytest.mark.parametrize(
    ("fill", "tool"),
    [(generate.generate_go, "go"), (generate.generate_ts, "npm"), (generate.generate_java, "mvn")],
)
def test_a_language_without_its_tool_chain_is_told(
    fill: Callable[[Path], None], tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(generate.ToolMissing, match=f"no {tool} here"):
        fill(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_differs_what_is_missing_and_what_is_left_over_is_stale(tmp_path: Path) -> None:
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for folder, files in (
        (fresh, {"same.go": "1", "other.go": "1", "new.ts": "1"}),
        (committed, {"same.go": "1", "other.go": "2", "gone.py": "1", "go.mod": "1"}),
    ):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    assert generate.stale_files(fresh, committed) == ["gone.py", "new.ts", "other.go"]


def test_what_is_generated_is_marked_as_such_for_the_forge() -> None:
    lines = (generate.OUTPUT_DIR.parent / ".gitattributes").read_text(encoding="utf-8").splitlines()
    marked = [line.split()[0] for line in lines if line.endswith(" linguist-generated")]
    assert sorted(pattern.split("/")[1] for pattern in marked) == sorted(generate.LANGUAGES)


def test_every_proto_is_there_in_every_language() -> None:
    names = {path.stem for path in (generate.PROTO_DIR / generate.API_DIR).glob("*.proto")}
    for language, suffix in (("python", "_pb2.py"), ("go", ".pb.go"), ("ts", "_pb.ts")):
        made = {
            path.name.removesuffix(suffix)
            for path in (generate.OUTPUT_DIR / language / "icehouse" / "v1").glob(f"*{suffix}")
            if not path.name.endswith("_grpc.pb.go")
        }
        assert made == names, language
    source = re.compile(r"^// source: icehouse/v1/(\w+)\.proto$", re.MULTILINE)
    java = (path.read_text(encoding="utf-8") for path in (generate.OUTPUT_DIR / "java").rglob("*.java"))
    sources = {found[1] for text in java if (found := source.search(text))}
    assert sources == names
