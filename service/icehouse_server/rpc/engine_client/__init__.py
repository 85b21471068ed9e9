"""The engine as the event loop sees it: routing, and the events of each call."""
