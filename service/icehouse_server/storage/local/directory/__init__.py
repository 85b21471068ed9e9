"""The cache directory: commits, manifest, reconciliation, eviction from disk."""
