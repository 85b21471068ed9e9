"""Tiny random-weight models of real mlx-lm architectures, made on the fly in milliseconds.

`build` returns a model object; `tiny_model_dir` writes a folder that `mlx_lm.load` takes.
"""

from tests.models.configs import ARCHITECTURES, FLOAT32_ONLY, tiny_config
from tests.models.folder import build, tiny_model_dir
from tests.models.vocabulary import VOCABULARY_SIZE

__all__ = ["ARCHITECTURES", "FLOAT32_ONLY", "VOCABULARY_SIZE", "build", "tiny_config", "tiny_model_dir"]
