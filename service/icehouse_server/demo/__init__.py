"""Demo models: real language models from the package index, each turned into an MLX folder once."""
