"""CPU attention that MLX's CPU build has no kernel for: a softmax over pages, quantized KV, angles."""
