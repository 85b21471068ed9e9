"""KV events: from the block log to subscribers."""
