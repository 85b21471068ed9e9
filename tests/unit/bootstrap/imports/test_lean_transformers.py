"""transformers, imported with less: the same tokenizers, no PyTorch, and each module read at most once.

Each import is that of a process of its own: in this one transformers is imported already.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.models.folder import tiny_model_dir
from tests.fixtures.patience import BOUND_S

LEAN = "from icehouse_server.bootstrap.imports.lean_transformers import import_mlx_lm; import_mlx_lm()"
PLAIN = "import mlx_lm"
TORCH = 'raise ImportError("PyTorch was imported")'


def told(*lines: str, folder: Path | None = None) -> list[str]:
    """Return what Python prints of these lines, with a folder of packages before all others."""
    path = [str(folder)] if folder else []
    program = "\n".join([f"import sys; sys.path[:0] = {path + sys.path}", *lines])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """Return a folder with a PyTorch that transformers would import, which ends the import."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH, encoding="utf-8")
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    return tmp_path


def test_it_reads_modules_once_and_no_model() -> None:
    """It fails when a release of transformers finds its names another way."""
    count = (
        "import collections; opened = collections.Counter()",
        "def note(event, arguments):",
        "    name = str(arguments[0]) if event == 'open' else ''",
        "    if name.endswith('.py') and 'transformers/models' in name: opened[name] += 1",
        "sys.addaudithook(note)",
    )
    show = (
        "models = [name for name in opened if '/modeling_' in name and '/models/auto/' not in name]",
        "print(len(opened), sum(times > 1 for times in opened.values()), len(models))",
    )
    [plain], [lean] = told(*count, PLAIN, *show), told(*count, LEAN, *show)
    file_count, again_count, model_count = map(int, plain.split())
    assert again_count > file_count * 0.9 and model_count > file_count / 4, plain
    read_count, again_count, model_count = map(int, lean.split())
    # Those that are imported, too, and whose bytecode is not kept.
    assert read_count < file_count * 0.75 and again_count < read_count / 10 and model_count == 0, lean


def test_pytorch_is_not_imported(torch: Path) -> None:
    with pytest.raises(AssertionError, match="PyTorch was imported"):
        told(PLAIN, folder=torch)
    shown = told(
        LEAN, "import importlib.util", "print(importlib.util.find_spec('torch').origin)", folder=torch
    )
    assert shown == [str(torch / "torch" / "__init__.py")], "whoever wants it finds it"


def test_tokenizers_and_processors_are_the_same(tmp_path: Path) -> None:
    model = str(tiny_model_dir(tmp_path, "llama"))
    ask = (
        "import json; from transformers import AutoImageProcessor, AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({model!r})",
        "print(json.dumps([type(tokenizer).__name__, tokenizer.encode('What is ice? Eis ist kalt.')]))",
        "from transformers import Qwen2VLImageProcessorPil, LlamaTokenizer, GemmaTokenizer",
    )
    lean, plain = told(LEAN, *ask), told(PLAIN, *ask)
    assert lean == plain and len(json.loads(lean[-1])[1]) > 3


def test_whoever_has_imported_it_keeps_it() -> None:
    assert told("import transformers", LEAN, "print('mlx_lm' in sys.modules)") == ["False"]
