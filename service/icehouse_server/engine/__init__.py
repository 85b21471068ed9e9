"""The inference thread: mailbox, scheduling, prefix cache, runner. Owns every mx.array."""
