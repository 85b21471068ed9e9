"""The prefix cache: block index, RAM tier, SSD tier, manifest, reconciliation."""
