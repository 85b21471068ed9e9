"""Attention on CPUs: a softmax by NumPy, over pages where they are."""
