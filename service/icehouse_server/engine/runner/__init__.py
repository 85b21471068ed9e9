"""The model runner: forward passes of an mlx-lm model, and what it is loaded from."""
