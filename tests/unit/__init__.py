"""One test module for one module of the server, in folders of the same names."""
