"""Completions, embeddings and rankings of texts."""
