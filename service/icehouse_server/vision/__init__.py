"""Images from their bytes to a model's tensors and tokens. A library: no mlx, any thread."""
