"""Status page: one server at a glance, for people with a browser."""
