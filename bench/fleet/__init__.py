"""Several workers behind a real gateway: shown (`make fleet`), measured and simulated (`make bench`)."""
