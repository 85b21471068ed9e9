"""Commands that start a server of their own on this machine, and stop it."""
