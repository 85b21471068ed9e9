"""Folder for PYTHONPATH that has an installed server write by a script; what is installed stays as it is.

It holds a copy of `scripted_replies`, the script, and what Python runs at its start, which waits for the
server to import what the script takes hold of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.fixtures.chat import scripted_replies
from tests.system.agents.scripted_model import Step

_AT_START = """
import importlib.machinery
import json
import sys
from pathlib import Path

WANTED = "icehouse_server.engine.engine"
FOLDER = Path(__file__).parent


class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        from scripted_replies import scripted

        told = json.loads((FOLDER / "script.json").read_text(encoding="utf-8"))
        scripted(Path(told["model"]), tuple(map(tuple, told["script"])))()


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != WANTED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
"""


def write_script_plugin(folder: Path, *, model: Path, steps: Sequence[Step]) -> Path:
    """Write the folder for a scripted model that follows the steps; return it."""
    folder.mkdir(parents=True)
    shutil.copy2(str(scripted_replies.__file__), folder / "scripted_replies.py")
    (folder / "sitecustomize.py").write_text(_AT_START, encoding="utf-8")
    script = [(step.phrase, step.reply) for step in steps]
    (folder / "script.json").write_text(json.dumps({"model": str(model), "script": script}), encoding="utf-8")
    return folder
