"""Sampling: from logits to tokens, one vectorised draw with a key for each row."""
