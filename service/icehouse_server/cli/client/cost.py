"""Cost of a call in one line: what was reused and from where, how long the first token took, how fast.

The whole of an answer, for JSON.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from icehouse_server.cli.top.view import duration_text

if TYPE_CHECKING:
    from icehouse_client import Reply, Usage


def cost_text(usage: Usage, finish_reason: str) -> str:
    """Return it for people."""
    parts = [f"{usage.prompt_tokens:,} prompt tokens, {reused_text(usage.ram_tokens, usage.ssd_tokens)}"]
    if usage.output_tokens:
        parts.append(f"first token after {duration_text(usage.ttft_s)}")
        rate = (usage.output_tokens - 1) / usage.decode_s if usage.decode_s > 0 else 0.0
        parts.append(f"{usage.output_tokens:,} tokens at {rate:.1f}/s")
    else:
        parts.append(f"{duration_text(usage.total_s)} in all")
    return " · ".join((*parts, finish_reason.replace("_", " ").lower()))


def reused_text(ram_tokens: int, ssd_tokens: int) -> str:
    """Return how many tokens came from the cache, and from where."""
    sources = [(ram_tokens, "RAM"), (ssd_tokens, "SSD")]
    told = ", ".join(f"{count:,} from {tier}" for count, tier in sources if count)
    return f"{ram_tokens + ssd_tokens:,} cached" + (f" ({told})" if told else "")


def reply_facts(reply: Reply) -> dict[str, object]:
    """Return an answer for JSON."""
    return {
        "request_id": reply.request_id,
        "model": reply.model,
        "text": reply.text,
        "reasoning": reply.reasoning,
        "finish_reason": str(reply.finish_reason),
        "reuse_limit": reply.reuse_limit,
        "seed": reply.seed,
        "usage": dataclasses.asdict(reply.usage),
    }
