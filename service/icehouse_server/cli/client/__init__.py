"""Commands that ask a running server, over the Python client."""
