"""Real server processes that are killed, stopped and started again."""
