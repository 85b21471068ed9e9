"""The cold tier on a disk of this machine: its thread, its readers, and the work for them."""
