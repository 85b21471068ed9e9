"""Client of Icehouse: `Client` for threads, `AsyncClient` for asyncio."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from icehouse_client.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import all of it at its first use: until then the command line can tell gRPC to be quiet."""
        return getattr(importlib.import_module("icehouse_client.api"), name)

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
