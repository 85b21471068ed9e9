"""Pool: the models that one server serves, which of them are loaded, and who gives way to whom."""
