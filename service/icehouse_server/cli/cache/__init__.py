"""`icehouse cache`: what is in a cache directory, and commands that change it."""
