"""Pool: the models that one server serves, which of them are loaded, and which give way to others."""
