"""What the process that servers are forked from has done already, when it is imported there."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from icehouse_server.engine.runner import mlx_lm
from icehouse_server.engine.runner.identity.kv_code import kv_code
from icehouse_server.text.tokenizer import Tokenizer

from tests.fixtures.models.configs import CONTEXT_TOKEN_LIMIT
from tests.fixtures.models.vocabulary import write_tokenizer

# What it reads is kept.
kv_code(Path(), {"model_type": "llama"}, has_adapter=False)
# So is what is found of the template that tiny models have.
with tempfile.TemporaryDirectory() as name:
    write_tokenizer(Path(name), context_token_limit=CONTEXT_TOKEN_LIMIT, chat_template=True)
    Tokenizer(mlx_lm.read_tokenizer(Path(name), eos_token_ids=None, trust_remote_code=False))
# No server need walk what all have in common, nor get pages of its own for it.
gc.collect()
gc.freeze()
