"""Several workers behind a real gateway: shown (`make fleet`), measured (`make bench-fleet`), simulated."""
