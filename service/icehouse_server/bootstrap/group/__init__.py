"""Composition of a group's ranks."""
