"""Damage: why a block file cannot be used."""

from __future__ import annotations

from icehouse_server.domain.blocks import Damage


class BlockFileError(Exception):
    """A file is not a complete, valid block file of this layout ABI."""

    def __init__(self, damage: Damage, message: str) -> None:
        super().__init__(message)
        self.damage = damage
