"""MCP server with one tool, over standard input and output: what Codex asks of such a server and no more."""

from __future__ import annotations

import json
import sys
from typing import Any

_SCHEMA = {"type": "object", "properties": {"grams": {"type": "integer"}}, "required": ["grams"]}


def answer_to(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request; empty for what is not known."""
    match method:
        case "initialize":
            about = {"name": "ice", "version": "1"}
            version = parameters["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": [{"name": "melt", "description": "Melts ice.", "inputSchema": _SCHEMA}]}
        case "tools/call":
            return {"content": [{"type": "text", "text": f"melted {parameters['arguments']['grams']} grams"}]}
        case _:
            return {}


def main() -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            result = answer_to(asked["method"], asked.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
