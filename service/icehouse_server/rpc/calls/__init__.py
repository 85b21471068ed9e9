"""Calls: each one's begin and end, errors as canonical statuses, and those who watch them."""
