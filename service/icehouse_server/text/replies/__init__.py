"""Replies of models, split into text, reasoning and calls."""
