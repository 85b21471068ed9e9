"""Choice of the backend for attention over pages on this device."""

from __future__ import annotations

from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.port import PagedAttention, PoolShape


def backend_for(shape: PoolShape) -> PagedAttention | None:
    """Return what attends to such pages here."""
    return GatherAttention()
