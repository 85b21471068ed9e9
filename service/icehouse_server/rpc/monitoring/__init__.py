"""Monitoring: statistics as they are read, polled and reported."""
