"""Demo models: real language models that come from the package index, each made into an MLX folder once."""
