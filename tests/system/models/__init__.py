"""Several models in one server."""
