"""The cold tier: its port and ticket, and what is shared by those who touch the cache directory. Nothing here
sees an mx.array or a request."""
