"""Families of models by the notation of their replies; each is an entry of data."""
