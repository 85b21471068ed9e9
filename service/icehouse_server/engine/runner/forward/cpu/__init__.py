"""What MLX's CPU build has no kernel for, done at a fraction of the cost. Other devices never come here."""
