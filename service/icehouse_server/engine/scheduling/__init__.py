"""Scheduling: who may start, who runs next, and who gives way."""
