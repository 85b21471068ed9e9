"""Explanation of a prompt for people: a bar of where its tokens come from, the time, and why not more."""

from __future__ import annotations

from icehouse.v1.cache_service_pb2 import ExplainResponse
from icehouse_client.results import reuse_limit_name
from rich.text import Text

from icehouse_server.cli.top.view import duration_text, printable

_WIDTH_LIMIT = 72
_RAM, _SSD, _COMPUTE = "█", "▓", "░"
_STYLES = {_RAM: "green", _SSD: "cyan", _COMPUTE: "yellow"}

LIMITS = {
    "NONE": "",
    "NO_MATCH": "no cached prompt begins like this one",
    "DIVERGED": "no cached prompt goes on like this one behind what is reused",
    "NO_CHECKPOINT": "more of it is cached, but this model can go on at a checkpoint only",
    "RECOMPUTE_FASTER": "more of it is on SSD, but computing it is predicted to be faster than loading it",
    "LOAD_FAILED": "a block on SSD was missing or damaged, and was dropped",
    "SWITCHED_OFF": "the server does not use its cache",
    "UNSUPPORTED": "this model's cache cannot be cut into blocks",
    "PROMPT_LOGPROBS": "the prompt's log probabilities were asked for, so all of it is computed",
}
"""Why no more is reused, by the API's word."""


def explanation(found: ExplainResponse, *, width: int) -> Text:
    """Return the bar and the lines below it."""
    report = found.cache
    compute = found.prompt_tokens - report.cached_tokens
    parts = [(_RAM, report.ram_tokens, "from RAM"), (_SSD, report.ssd_tokens, "from SSD")]
    parts.append((_COMPUTE, compute, "to compute"))
    text = bar([(mark, count) for mark, count, _ in parts], width=min(width, _WIDTH_LIMIT))
    text.append(f"\n{found.prompt_tokens:,} tokens: ")
    for index, (mark, count, what) in enumerate(parts):
        text.append("   " if index else "")
        text.append(mark, style=_STYLES[mark])
        text.append(f" {count:,} {what}")
    if found.HasField("predicted_time_to_first_token"):
        text.append(
            f"\nfirst token in about {_time_text(found.predicted_time_to_first_token.ToNanoseconds())}"
        )
        if found.HasField("predicted_time_to_first_token_cold"):
            cold = found.predicted_time_to_first_token_cold
            text.append(f", without the cache {_time_text(cold.ToNanoseconds())}")
    else:
        text.append("\nno time is predicted yet: this server has measured no prompt")
    limit = reuse_limit_name(report)
    if why := LIMITS.get(limit, limit.replace("_", " ").lower()):
        text.append(f"\nwhy not more: {why}")
    if report.HasField("divergence"):
        place = report.divergence
        text.append(
            f"\nthe nearest cached prompt parts from it at token {place.token_index:,}: "
            f"{printable(place.prompt_token.text)!r} here, {printable(place.cached_token.text)!r} there"
        )
    pinned = sum(block.token_count for block in found.blocks if block.pinned)
    if pinned:
        text.append(f"\n{pinned:,} of its tokens are pinned")
    return text


def bar(parts: list[tuple[str, int]], *, width: int) -> Text:
    """Return a bar of so many columns; what is there at all has one at least."""
    total = sum(count for _, count in parts)
    columns = {mark: max(1, round(count * width / total)) for mark, count in parts if count}
    if columns:
        # What rounding gave too much or too little is the longest part's.
        columns[max(columns, key=columns.__getitem__)] += width - sum(columns.values())
    return Text.assemble(*((mark * count, _STYLES[mark]) for mark, count in columns.items()))


def _time_text(time_ns: int) -> str:
    return duration_text(time_ns / 1e9)
