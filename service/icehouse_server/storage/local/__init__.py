"""The cold tier on a disk of this machine: its thread, the readers beside it, and the work they are given."""
