"""The cold tier: its port and tickets, and what all users of the cache directory share. Nothing here sees an
mx.array or a request."""
