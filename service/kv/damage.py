"""Why a block file cannot be used."""

from __future__ import annotations

import enum


class Damage(enum.StrEnum):
    """Why a file is not the block it should be. Also the cause of a failed load."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    HEADER = "header"
    CHECKSUM = "checksum"
    MISMATCH = "mismatch"
    SEAL = "seal"
    """It is not what was encrypted: changed by somebody, or not encrypted at all."""
    OTHER_ABI = "other_abi"
    IO = "io"
    LAYOUT = "layout"
    """Its tensors are not those of the blocks before it."""
    MEMORY = "memory"
    """No memory to read it into; the file is not at fault."""


class BlockFileError(Exception):
    """A file is not a complete, valid block file of this layout ABI."""

    def __init__(self, damage: Damage, message: str) -> None:
        super().__init__(message)
        self.damage = damage
