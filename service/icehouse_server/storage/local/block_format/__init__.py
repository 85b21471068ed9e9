"""The block file: one safetensors file for each block, its header, checksums and damage."""
