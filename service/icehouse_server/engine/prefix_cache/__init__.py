"""The prefix cache: who reuses, follows or restores which blocks, and what is kept of new ones."""
