"""What transformers computes with PyTorch for the tiny encoders; its numbers are in transformers.json.

Neither is a dependency here. To make the file anew, with both in another environment:

    PYTHONPATH=. .venv/bin/python -m tests.unit.engine.runner.encoders.transformers_run FOLDER
    cd FOLDER && OTHER/bin/python run.py && cp transformers.json REPOSITORY/tests/unit/engine/runner/encoders/
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Final

import numpy as np

from tests.fixtures.models.encoders import ENCODER_CONFIGS, SCORING, tiny_encoder_dir

LENGTHS: Final = (2, 7, 7, 40, 600)


def texts() -> list[list[int]]:
    """Return pairs of texts of these lengths, parted and ended by token 2, by length."""
    random = np.random.default_rng(0)
    found = []
    for length in LENGTHS:
        first, second = (random.integers(5, 300, n).tolist() for n in (length, length // 2))
        found.append([3, *first, 2, *second, 2])
    return found


def tiny_encoders(folder: Path) -> dict[str, Path]:
    """Write every tiny encoder, with a head and without, and return their folders by name."""
    found = {kind: tiny_encoder_dir(folder, kind) for kind in ENCODER_CONFIGS}
    for kind in SCORING:
        name = f"{kind} scores"
        found[name] = tiny_encoder_dir(folder, kind, scores=True, name=name)
    return found


_RUN: Final = """
import json, pathlib, torch, transformers
texts, found = json.loads(pathlib.Path("texts.json").read_text()), {}
for folder in sorted(path for path in pathlib.Path().iterdir() if path.is_dir()):
    scores = folder.name.endswith("scores")
    kind = "AutoModelForSequenceClassification" if scores else "AutoModel"
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    found[folder.name] = []
    for text in texts:
        inputs = {"input_ids": torch.tensor([text]), "attention_mask": torch.ones(1, len(text)).long()}
        if folder.name == "bert scores":
            first = text.index(2) + 1
            inputs["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(text) - first)])
        with torch.no_grad():
            out = model(**inputs)
        if scores:
            rows = [out.logits[0]]
        else:
            hidden = out.last_hidden_state[0]
            rows = [hidden[0], hidden[-1], hidden.mean(0)]
        found[folder.name].append([[float(f"{x:.6g}") for x in row.tolist()] for row in rows])
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
rows = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()]
text = "{" + f'"versions": {json.dumps(versions)},' + "\\n" + ",\\n".join(rows) + "}\\n"
pathlib.Path("transformers.json").write_text(text)
"""

if __name__ == "__main__":
    place = Path(sys.argv[1])
    shutil.rmtree(place, ignore_errors=True)
    tiny_encoders(place)
    (place / "texts.json").write_text(json.dumps(texts()), encoding="utf-8")
    (place / "run.py").write_text(_RUN, encoding="utf-8")
