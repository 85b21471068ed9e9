"""Registry of the families, in the order in which they are tried."""

from __future__ import annotations

from icehouse_server.text.replies.families.channel_families import CHANNEL_FAMILIES
from icehouse_server.text.replies.families.json_families import JSON_FAMILIES
from icehouse_server.text.replies.families.named_families import NAMED_FAMILIES
from icehouse_server.text.replies.families.python_families import PYTHON_FAMILIES
from icehouse_server.text.replies.families.tag_families import TAG_FAMILIES

FAMILIES = (*CHANNEL_FAMILIES, *TAG_FAMILIES, *NAMED_FAMILIES, *PYTHON_FAMILIES, *JSON_FAMILIES)
