"""A small client of our own API, for the command line."""
