"""Images that a request names instead of bringing them: where from, and how they are read.

Of the event loop, but for what blocks: files, names and hosts have a few threads (`fetcher`).
"""
