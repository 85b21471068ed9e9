"""Icehouse: a gRPC service for MLX language models whose prefix cache survives restarts."""
