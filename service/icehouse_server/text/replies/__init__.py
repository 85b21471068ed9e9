"""Replies of models, read: what is said, thought and called."""
