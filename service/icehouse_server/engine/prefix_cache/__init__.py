"""The prefix cache: which blocks a prompt reuses, waits for or restores, and which new ones are captured."""
