"""Encryption at rest: a cipher, its implementation with AES-256-GCM, and its keys."""
