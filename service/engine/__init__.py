"""The inference thread: mailbox, scheduler, runner, text. Owns every mx.array."""
