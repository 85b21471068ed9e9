"""Cases of `make bench`: each measures one thing that callers wait for, a round at a time."""
