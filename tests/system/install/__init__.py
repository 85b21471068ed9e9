"""Installs as users make them, from wheels alone."""
