"""KV caches of mlx-lm, cut into a block's regions and rebuilt from them, class by class."""
