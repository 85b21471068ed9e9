"""`icehouse top`: a server's numbers on a terminal."""
