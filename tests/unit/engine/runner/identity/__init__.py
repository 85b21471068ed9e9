"""Identity of a served model."""
