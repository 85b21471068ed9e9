"""Which models are loaded, and who gives way."""
