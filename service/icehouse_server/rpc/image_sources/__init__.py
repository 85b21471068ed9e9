"""Images that a request names instead of sending: where they may come from, and how they are read."""
