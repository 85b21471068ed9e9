"""Runner of models: forward passes of an mlx-lm model, and what it is loaded from."""
