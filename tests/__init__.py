"""Tests, one folder per room of `service/` and one per house of ARCHITECTURE.md."""
