"""KV caches of every class of mlx-lm, cut and put back on real (tiny) models. Needs mlx, no device."""
