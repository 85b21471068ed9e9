"""Benches of the HTTP front: what the way through it costs, and what hostile callers do to the others."""
