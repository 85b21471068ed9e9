"""Commands that start their own server on this machine, and stop it."""
