"""Bounds: what one caller may take of the front, so that the others are answered beside it."""
