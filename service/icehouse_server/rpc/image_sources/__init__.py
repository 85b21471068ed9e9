"""Images that a request names instead of sending them: where they may come from, and how they are read."""
