"""Serving: the process around the app, what watches its requests, and what it says."""
