"""Registry of the families, in the order in which they are tried."""

from __future__ import annotations

from icehouse_server.text.replies.families.json_families import JSON_FAMILIES
from icehouse_server.text.replies.families.named_families import NAMED_FAMILIES

FAMILIES = (*NAMED_FAMILIES, *JSON_FAMILIES)
