"""Sampling: from logits to tokens, in one vectorised draw with a key for each row."""
