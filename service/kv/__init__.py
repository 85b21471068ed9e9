"""Blocks of KV and their tiers: identity, RAM, SSD. Nothing here knows gRPC or requests."""
