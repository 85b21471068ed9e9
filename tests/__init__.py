"""Tests: `unit` mirrors the server module by module, `system` tries it whole, `tidy` reads its source."""
