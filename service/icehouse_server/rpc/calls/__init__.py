"""Calls: begin and end of each one, errors as canonical statuses, and the watchers of calls."""
