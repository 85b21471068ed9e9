"""What the process that servers are forked from has done already, when it is imported there."""

from __future__ import annotations

import gc
from pathlib import Path

from icehouse_server.engine.runner.identity.kv_code import kv_code

# What it reads is kept.
kv_code(Path(), {"model_type": "llama"}, has_adapter=False)
# No server need walk what all have in common, nor get pages of its own for it.
gc.collect()
gc.freeze()
