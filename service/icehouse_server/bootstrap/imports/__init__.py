"""What must be done before MLX and transformers are imported."""
