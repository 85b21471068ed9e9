"""Attention over pages: one port, and the backends that compute it on each kind of device."""
