"""GPU attention over pages: custom kernels with one body for CUDA and Metal."""
