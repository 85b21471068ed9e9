"""The storage thread: its loop, the readers beside it, and the work they are given."""
