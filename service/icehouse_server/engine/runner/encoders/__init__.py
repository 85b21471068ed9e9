"""Encoders: models that read a text whole, in both directions, and make one vector or score of it."""
