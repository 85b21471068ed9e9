"""The demo model: a real language model that comes from the package index, made into an MLX folder once."""
