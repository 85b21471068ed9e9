"""What a store has written and let go of. Owned by the storage thread."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class StoreCounters:
    """Since this object was made. Sizes in bytes."""

    written_bytes: int = 0
    evicted_count: int = 0
    evicted_bytes: int = 0
    purged_count: int = 0
    quarantined_count: int = 0
