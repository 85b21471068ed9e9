"""Attention over pages on GPUs: custom kernels of one body for CUDA and Metal."""
