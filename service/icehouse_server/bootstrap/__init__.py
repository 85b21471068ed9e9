"""Composition root: from a configuration to a server whose parts are wired but not started."""
