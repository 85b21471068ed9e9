"""The engine as the event loop sees it: routing, and events on their way to a call."""
