"""`icehouse doctor`: what would keep a server from running here, and how to mend it."""
