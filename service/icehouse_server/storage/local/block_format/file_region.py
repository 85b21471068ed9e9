"""File region: where a region is in its block file and how it is stored, to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.storage.api import TensorShape
from icehouse_server.storage.local.block_format.planes import RATIO_LIMIT

REGION_ORDER = tuple(RegionKind)


@dataclasses.dataclass(frozen=True, slots=True)
class Planes:
    """The stored bytes of a region in byte planes, and the xxh3 (64 bits) of its tensors' bytes."""

    stored_bytes: int
    checksum: int | None
    """None if the file is encrypted under an unknown key: in the clear it would confirm a guess."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileRegion:
    """A region's position in the file and the xxh3 (64 bits) of its bytes there."""

    kind: RegionKind
    offset: int
    """From the start of the file."""
    size_bytes: int
    """Bytes of its tensors."""
    checksum: int
    tensors: tuple[TensorShape, ...] = ()
    """They fill the region in this order. Empty if the file is encrypted under an unknown key."""
    tag: bytes = b""
    """Authenticates an encrypted region."""
    planes: Planes | None = None
    """Set if the region is stored in byte planes; None: its tensors are stored as in memory."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that the region takes in the file."""
        return self.planes.stored_bytes if self.planes else self.size_bytes


def regions_to_json(regions: Sequence[FileRegion], *, begin: int = 0, is_public: bool = False) -> str:
    """Return regions as text: offsets (from `begin` in the file), bytes, checksums and tags. With
    `is_public`, leave out checksums of what is encrypted."""
    items = [
        {
            "kind": r.kind,
            "offset": r.offset - begin,
            "size_bytes": r.size_bytes,
            "xxh3": f"{r.checksum:016x}",
            **({"tag": r.tag.hex()} if r.tag else {}),
            **({"stored_bytes": r.planes.stored_bytes} if r.planes else {}),
            **(
                {"tensors_xxh3": f"{r.planes.checksum:016x}"}
                if r.planes and r.planes.checksum is not None and not is_public
                else {}
            ),
        }
        for r in regions
    ]
    return json.dumps(items, separators=(",", ":"))


def parse_regions(text: str, *, data_offset: int) -> tuple[FileRegion, ...]:
    """Return regions without their tensors, in order and without gaps. Raises what damaged text causes."""
    regions: list[FileRegion] = []
    offset = data_offset
    for item in json.loads(text):
        region = FileRegion(
            kind=RegionKind(str(item["kind"])),
            offset=int(item["offset"]) + data_offset,
            size_bytes=int(item["size_bytes"]),
            checksum=int(str(item["xxh3"]), 16),
            tag=bytes.fromhex(str(item.get("tag", ""))),
            planes=_parse_planes(item),
        )
        if region.offset != offset or min(region.size_bytes, region.stored_bytes) < 0:
            raise ValueError(f"region {region.kind} begins at {region.offset}, not at {offset}")
        if region.size_bytes > RATIO_LIMIT * region.stored_bytes:
            raise ValueError(f"{region.stored_bytes} bytes of region {region.kind} cannot be so much")
        offset += region.stored_bytes
        regions.append(region)
    if any(REGION_ORDER.index(a.kind) >= REGION_ORDER.index(b.kind) for a, b in pairwise(regions)):
        raise ValueError("regions are out of order")
    return tuple(regions)


def _parse_planes(item: Mapping[str, object]) -> Planes | None:
    if "stored_bytes" not in item:
        return None
    checksum = int(str(item["tensors_xxh3"]), 16) if "tensors_xxh3" in item else None
    return Planes(int(str(item["stored_bytes"])), checksum)
