"""A constraint whose answers are known beforehand."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


class AllowOnly:
    """Allows one set of tokens for ever, and counts the masks it was asked for."""

    is_finished = False
    allows_any = False
    error = None

    def __init__(self, allowed: Collection[int], *, word_count: int = 2) -> None:
        self._allowed = frozenset(allowed)
        self._mask = np.zeros(word_count, dtype=np.uint32)
        for token_id in allowed:
            self._mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
        self.mask_count = 0

    def allows(self, token_id: int) -> bool:
        return token_id in self._allowed

    def allowed_tokens(self) -> np.ndarray:
        self.mask_count += 1
        return self._mask

    def accept(self, token_id: int) -> None:
        """It allows the same whatever was drawn."""
