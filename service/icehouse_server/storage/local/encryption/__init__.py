"""Encryption at rest: a cipher, AES-256-GCM behind it, and its keys."""
